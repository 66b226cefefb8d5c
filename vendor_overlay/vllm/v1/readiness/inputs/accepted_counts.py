"""Fix ``accepted-counts``: a request of a hybrid model reads its own count of accepted drafts.

A Mamba layer keeps a state per draft. The next step continues from the state after the last
accepted draft, so a wrong count corrupts every later token. 0.22.0 keeps the counts by row, in one
array that the device writes and in which the host moves rows:

- under async scheduling, the host maps the counts from the previous step's rows to the current
  rows. Counts that arrive before a row swap are moved by the swap, and then mapped again;
- if no request of the previous step remains, a new request reads the count of its row's previous
  request;
- a request skipped by a step comes back with a count of 1. A step skips requests if the token
  budget is exhausted or if drafts might exceed max_model_len.

Here the device writes a separate array, and a skipped request keeps its count.
(https://github.com/vllm-project/vllm/issues/45100, 51571)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states_after_model_execute
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class AcceptedCounts(Feature):
    """Accepted-draft counts of one batch."""

    def __init__(self, batch: "InputBatch") -> None:
        super().__init__(batch)
        #: Whether the runner counts accepted drafts; None before its first step.
        self._serving: bool | None = None
        #: Counts by row of the newest step, written by the device; None without async scheduling.
        self._arrived: np.ndarray | None = None
        #: Rows in ``_arrived`` of requests that have left since the last step, by id.
        self._leaving: dict[str, int] = {}
        #: Counts of requests that may come back.
        self._left: dict[str, int] = {}

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the count of a request that may come back."""
        if not self._serving:
            return
        if self._arrived is None:
            self._left[request.req_id] = int(self.batch.num_accepted_tokens_cpu[row])
        elif (before := (self.batch.prev_req_id_to_index or {}).get(request.req_id)) is not None:
            self._leaving[request.req_id] = before

    def gather(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Write each request's number of accepted tokens to its row, on the host.

        Requests that come back keep their counts.
        """
        if self._serving is None:
            self._begin(runner)
        if not self._serving:
            return
        count = self.batch.num_reqs
        rows = self.batch.num_accepted_tokens_cpu[:count]
        if self._arrived is not None:
            before = runner.prev_positions.np[:count]
            rows[:] = np.where(before < 0, 1, self._arrived[before])
            if self._leaving:
                self._left |= {name: self._arrived[row] for name, row in self._leaving.items()}
                self._leaving = {}
        if self._left:
            self._restore(runner, scheduled)
        runner.num_accepted_tokens.np[:count] = rows

    def _begin(self, runner: "GPUModelRunner") -> None:
        """Check the runner; under async scheduling, split the host's counts from the device's."""
        # A derived class may write its counts elsewhere.
        ours = subclasses.ends_in_seam(type(runner), "_update_states_after_model_execute")
        self._serving = ours and runner.model_config.is_hybrid
        if self._serving and runner.use_async_scheduling:
            self._arrived = self.batch.num_accepted_tokens_cpu_tensor.numpy()
            self.batch.num_accepted_tokens_cpu = self._arrived.copy()

    def _restore(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Restore the counts of requests that come back with their Mamba states."""
        cached = scheduled.scheduled_cached_reqs
        for name in [name for name in self._left if name in self.batch.req_id_to_index]:
            kept = self._left.pop(name)
            if name in cached.req_ids and name not in cached.resumed_req_ids:
                self.batch.num_accepted_tokens_cpu[self.batch.req_id_to_index[name]] = kept
        self._left = {name: kept for name, kept in self._left.items() if name in runner.requests}
