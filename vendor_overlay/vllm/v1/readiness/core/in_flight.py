"""In-flight steps of a scheduler, and the requests whose in-flight output is dropped.

The fixes ``preemption``, ``failed-loads`` and ``kv-transfers`` share one :class:`InFlight` per
scheduler. Each calls it from its own seams, and works alone.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput


class InFlight:
    """In-flight steps of one scheduler.

    Attributes:
        steps: the steps whose output has not arrived, oldest first.
        dropped: ``id()`` of an in-flight step to the ids of requests whose output is dropped.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.steps: deque[SchedulerOutput] = deque()
        self.dropped: dict[int, set[str]] = {}
        #: Prompt logprobs saved from dropped outputs, by request id.
        self._prompt_logprobs: dict[str, LogprobsTensors] = {}
        #: Ids of requests whose in-flight prompt logprobs are wrong, and will be recomputed.
        self._stale_prompts: set[str] = set()

    def schedule(self, step: "SchedulerOutput") -> None:
        """Add a scheduled step; a second call for the same step is a no-op."""
        if not (self.steps and self.steps[-1] is step):
            self.steps.append(step)

    def awaits(self, name: str) -> bool:
        """Return whether a request has in-flight output that will be delivered."""
        return any(
            name in step.num_scheduled_tokens and name not in self.dropped.get(id(step), ())
            for step in self.steps
        )

    def drop(self, name: str, prompt_is_stale: bool = False) -> None:
        """Drop a request's output in all in-flight steps.

        Prompt logprobs are delivered with the request's next tokens, unless ``prompt_is_stale``.
        """
        for step in self.steps:
            if name in step.num_scheduled_tokens:
                self.dropped.setdefault(id(step), set()).add(name)
                if prompt_is_stale:
                    self._stale_prompts.add(name)
        if prompt_is_stale:
            self._prompt_logprobs.pop(name, None)

    def arrive(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Remove dropped results from a step's output; a second call for the step is a no-op.

        Steps arrive in order. Earlier steps that have not arrived were abandoned.
        """
        if not any(known is step for known in self.steps):
            return
        while (first := self.steps.popleft()) is not step:
            self.dropped.pop(id(first), None)
        for name in self.dropped.pop(id(step), ()):
            self.take_out(name, output)
        self._stale_prompts &= set[str]().union(*self.dropped.values())
        self._deliver_prompt_logprobs(output)

    def take_out(self, name: str, output: "ModelRunnerOutput") -> None:
        """Remove a request's results from an output, and save the prompt logprobs."""
        row = output.req_id_to_index.get(name)
        if row is not None and output.sampled_token_ids:
            output.sampled_token_ids[row] = []
        if row is not None and output.pooler_output:
            output.pooler_output[row] = None
        logprobs = output.prompt_logprobs_dict.pop(name, None)
        if logprobs is not None and name not in self._stale_prompts:
            self._prompt_logprobs[name] = logprobs

    def _deliver_prompt_logprobs(self, output: "ModelRunnerOutput") -> None:
        for name in list(self._prompt_logprobs):
            row = output.req_id_to_index.get(name)
            if name not in self._scheduler.requests:
                del self._prompt_logprobs[name]
            elif row is not None and output.sampled_token_ids and output.sampled_token_ids[row]:
                output.prompt_logprobs_dict[name] = self._prompt_logprobs.pop(name)
