"""Feature ``input-ids``: a step's input ids are filled for the whole batch at once.

Under async scheduling the newest tokens and drafts are on the device. 0.22.0 computes the indices
of their copies in a Python loop over rows, and uploads two lists for tokens and two for drafts.
With drafts, another loop counts drafts, five metadata arrays are uploaded one by one, from pageable
memory, and with ``ngram_gpu`` each row with a rejected draft has its length corrected by several
calls of torch. Here numpy operations process all rows, and one upload from newly allocated pinned
memory carries all values. Results and uploaded values equal upstream's, bit for bit.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._compute_prev_positions
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.inputs import uploads
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: A step's drafts, by request id.
Drafts = Mapping[str, Sequence[int]]
#: Number of rows or of requests with drafts below which upstream's loops are as fast.
_FEW = 16


class InputIds:
    """Input ids of one batch."""

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch
        #: Result of :func:`_holds_outputs`; None before the first check.
        self._holds_outputs: bool | None = None

    def subtract_rejected(
        self,
        runner: "GPUModelRunner",
        assumed: "Sequence[tuple[str, int, CachedRequestState]]",
        sampled: Sequence[int],
    ) -> None:
        """Subtract the last step's rejected drafts from the counts of requests and rows.

        Args:
            runner: the batch's, under async scheduling.
            assumed: ids of requests with drafts in the last step, the number of drafts that was
                assumed to be accepted, and the requests.
            sampled: number of tokens sampled for each row of the last step.
        """
        batch, count = self.batch, self.batch.num_reqs
        previous, rows = batch.prev_req_id_to_index or {}, batch.req_id_to_index
        rejected = np.zeros(count, np.int32)
        for req_id, drafts, request in assumed:
            if (source := previous.get(req_id)) is None:
                continue
            number = drafts + 1 - sampled[source]
            request.num_computed_tokens -= number
            if (row := rows.get(req_id)) is not None:
                rejected[row] = number
        batch.num_computed_tokens_cpu[:count] -= rejected
        config = runner.speculative_config
        if config is not None and config.use_ngram_gpu() and (rejected > 0).any():
            rejected = rejected.clip(min=0)
            batch.num_tokens_no_spec[:count] -= rejected
            runner.num_tokens_no_spec_gpu[:count] -= uploads.upload(
                rejected, torch.int32, runner.device, runner.pin_memory
            )

    def find_previous(self, previous: np.ndarray) -> bool:
        """Write each request's previous row, or -1, to ``previous`` [rows]; True if done."""
        if len(previous) < _FEW:
            return False
        previous[:] = previous_rows(self.batch, len(previous))
        return True

    def count_tokens(self, runner: "GPUModelRunner") -> np.ndarray | None:
        """Count each request's tokens, int [rows]; None to fall back to upstream."""
        batch = self.batch
        rows = batch.num_reqs
        if rows < _FEW:
            return None
        if self._holds_outputs is None:
            self._holds_outputs = _holds_outputs(type(runner), type(runner.input_batch))
        if not self._holds_outputs:
            return None
        outputs = np.fromiter(map(len, batch.req_output_token_ids), np.int32, rows)
        counts: np.ndarray = outputs + batch.num_prompt_tokens[:rows]
        return counts

    def fill(
        self,
        runner: "GPUModelRunner",
        scheduled: "SchedulerOutput",
        rows: int,
        tokens: int,
        ends: np.ndarray,
    ) -> bool:
        """Fill ``input_ids`` on the device, instead of upstream; True if done.

        ``rows`` and ``tokens`` are the numbers of requests and tokens in the step. ``ends`` [rows]
        is the index after each request's last token.
        """
        proposed = runner._draft_token_ids
        drafts = scheduled.scheduled_spec_decode_tokens
        if drafts and isinstance(proposed, list):
            return False
        sources, ends = runner.prev_positions.np[:rows], ends[:rows]
        if not drafts and rows == tokens and _copy_in_order(runner, sources, ends):
            return True
        counts = count(runner.input_batch, drafts, rows)
        known = sources >= 0
        common = int(np.count_nonzero(known))
        if common < rows:
            sources, ends, counts = sources[known], ends[known], counts[known]
        totals = counts.cumsum()
        drafted = int(totals[-1]) if common else 0
        if common + drafted < tokens:
            runner.input_ids.copy_to_gpu(tokens)
            if runner.enable_prompt_embeds:
                runner.inputs_embeds.copy_to_gpu(tokens)
                runner.is_token_ids.copy_to_gpu(tokens)
        if not common or _copy_in_order(runner, sources, ends):
            return True
        _scatter(runner, sources, ends, counts, totals)
        return True

    def count_drafts(self, drafts: Drafts, counts: np.ndarray, decoding: np.ndarray) -> bool:
        """Write each request's number of drafts to ``counts`` [rows], which is zero; True if done.

        Rows past their prompt have the number written to ``decoding`` [rows], too.
        """
        if len(drafts) < _FEW:
            return False
        batch = self.batch
        rows = np.fromiter(map(batch.req_id_to_index.__getitem__, drafts), np.intp, len(drafts))
        counts[rows] = np.fromiter(map(len, drafts.values()), counts.dtype, len(drafts))
        rows = rows[batch.num_computed_tokens_cpu[rows] >= batch.num_prompt_tokens[rows]]
        decoding[rows] = counts[rows]
        return True

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: np.ndarray, ends: np.ndarray
    ) -> SpecDecodeMetadata | None:
        """Build a step's speculative decoding metadata; None to fall back to upstream.

        ``counts`` [rows] is the number of drafts per row, and ``ends`` [rows] the index after each
        row's last token.
        """
        if counts.dtype != np.int32 or ends.dtype != np.int64:
            return None
        rows, numbers = len(counts), runner.arange_np
        draft_ends = counts.cumsum()
        drafted = int(draft_ends[-1])
        sampled_ends = draft_ends + numbers[1 : rows + 1]
        sampled = drafted + rows
        logits = numbers[:sampled] + (ends - sampled_ends).repeat(counts + 1)
        # Each earlier row has one bonus token after its drafts.
        targets = numbers[:drafted] + numbers[:rows].repeat(counts)
        wide, narrow = uploads.together(
            [logits, logits[targets + 1]],
            [draft_ends, sampled_ends, targets, sampled_ends - 1],
            runner.device,
            runner.pin_memory,
        )
        drafts = runner.input_ids.gpu.take(wide[1])
        return SpecDecodeMetadata(drafts, counts.tolist(), *narrow, logits_indices=wide[0])


def _copy_in_order(runner: "GPUModelRunner", sources: np.ndarray, ends: np.ndarray) -> bool:
    """Copy the newest tokens if each request's row and index are its previous row; True if copied.

    ``sources`` [n], with n > 0, is each request's row in the previous step, and ``ends`` [n] the
    index after its last token.
    """
    count = len(ends)
    # Comparing the bytes costs less than comparing the arrays.
    if ends[-1] != count or sources.tobytes() != (ends - 1).tobytes():
        return False
    newest = runner.input_batch.prev_sampled_token_ids[:count, 0]
    runner.input_ids.gpu[:count].copy_(newest, non_blocking=True)
    return True


def _scatter(
    runner: "GPUModelRunner",
    sources: np.ndarray,
    ends: np.ndarray,
    counts: np.ndarray,
    totals: np.ndarray,
) -> None:
    """Scatter each request's newest token and its drafts into ``input_ids``.

    ``sources`` [n] is each request's row in the previous step, ``ends`` [n] the index after its
    last token, ``counts`` [n] its number of drafts, and ``totals`` [n] the inclusive cumulative sum
    of ``counts``. Each call allocates host memory, because earlier copies may be in flight.
    """
    drafts = runner._draft_token_ids
    drafted = 0 if drafts is None else int(totals[-1])
    first, second = len(ends), 2 * len(ends)
    third = second + drafted
    staged = torch.empty(third + drafted, dtype=torch.int64, pin_memory=runner.pin_memory)
    indices = staged.numpy()
    np.subtract(ends, counts + 1, out=indices[:first])
    indices[first:second] = sources
    if drafted:
        # A request's drafts are consecutive in the step, and in the proposed drafts.
        numbers = runner.arange_np[:drafted]
        np.add(numbers, (ends - totals).repeat(counts), out=indices[second:third])
        proposed = sources * runner.num_spec_tokens + counts
        np.add(numbers, (proposed - totals).repeat(counts), out=indices[third:])
    sent = staged.to(runner.device, non_blocking=True)
    sampled = runner.input_batch.prev_sampled_token_ids
    newest = sampled if sampled.shape[1] == 1 else sampled[:, 0]
    ids = runner.input_ids.gpu
    ids.scatter_(0, sent[:first], newest.take(sent[first:second]))
    if drafted:
        kept = drafts.take(sent[third:]).to(torch.int32)
        ids.scatter_(0, sent[second:third], kept)


def previous_rows(batch: "InputBatch", rows: int) -> np.ndarray:
    """Return each row's row in the previous step, int64 [rows]; -1 if it has none."""
    known, names = batch.prev_req_id_to_index or {}, batch.req_ids
    same = [*known] == names
    found = known.values() if same else map(known.get, names, repeat(-1))
    return np.fromiter(found, np.int64, rows)


def count(batch: "InputBatch", drafts: Drafts, rows: int) -> np.ndarray:
    """Count each row's drafts, int64 [rows]; ignore requests that are not in the batch."""
    counts = np.zeros(rows + 1, np.int64)  # the last element is for the ignored requests
    if drafts:
        drafted = map(batch.req_id_to_index.get, drafts, repeat(rows))
        counts[np.fromiter(drafted, np.intp, len(drafts))] = np.fromiter(
            map(len, drafts.values()), np.int64, len(drafts)
        )
    return counts[:rows]


def _holds_outputs(runner: type, batch: type) -> bool:
    """Return whether the batch and its requests share output lists, as in vLLM's classes."""
    updates = subclasses.ends_in_seam(runner, "_update_states")
    return updates and subclasses.ends_in_seam(batch, "add_request")
