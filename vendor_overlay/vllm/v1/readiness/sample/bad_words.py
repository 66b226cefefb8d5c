"""Feature ``bad-words``: bad words matched and masked on the device.

On each step upstream compares the end of every output with every word in Python lists, for which
the host waits for the newest token. Here each request with bad words has a slot on the device. The
slot holds the words and a tail: the newest output tokens, as many as a word may match. Sampled
tokens are appended to the tail, and tokens that would complete a word are masked.

The result equals that of ``apply_bad_words`` bit for bit: both write minus infinity and read no
logit. Prompts are not matched, and words whose last token is beyond the logits are skipped. On
platforms other than CUDA, a slot holds only a tail; see ``bad_words_torch``.
"""

# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words
# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words_with_drafts
# mirrors: vllm.v1.sample.ops.bad_words:_apply_bad_words_single_batch
# mirrors: vllm.v1.sample.ops.bad_words:_SMALLEST_LOGIT
# mirrors: vllm.v1.sample.sampler:Sampler.apply_logits_processors
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.readiness import registry
from vllm.v1.readiness.sample.bad_words_torch import MAX_ID, NOTHING, Tails, Words
from vllm.v1.readiness.sample.slots import Slots, row_stride

if TYPE_CHECKING:
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

_BLOCK = 32


class BadWords(Slots):
    """Bad words of one batch."""

    name = registry.BAD_WORDS

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch, history)
        if current_platform.is_cuda():
            from vllm.v1.readiness.kernels import bad_words as kernels

            self.kernels = kernels
        self._words: dict[str, Words] = {}
        #: Requests with words that slots do not support.
        self._unsupported: set[str] = set()
        #: Number of kernel blocks for the longest list of words.
        self._blocks = 1
        self._tails: Tails | None = None

    def add_request(self, request: "CachedRequestState") -> None:
        """Mark the request to get a slot, if all of its words are supported."""
        super().add_request(request)
        if request.req_id in self._slots:
            self._words[request.req_id] = Words.of(_words(request))
        elif _words(request):
            self._unsupported.add(request.req_id)

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the request's slot, and drop its words."""
        super().remove_request(request, row)
        self._words.pop(request.req_id, None)
        self._unsupported.discard(request.req_id)

    def _wants(self, request: "CachedRequestState") -> bool:
        words = _words(request)
        return bool(words) and all(
            word and min(word) >= 0 and max(word) <= MAX_ID for word in words
        )

    def _can_serve(self, metadata: "SamplingMetadata", width: int) -> bool:
        # For wider logits, upstream drops some tokens beyond the vocabulary.
        return self._used(metadata) and not self._unsupported and width <= self.vocab_size

    def _describes_rows(self, metadata: "SamplingMetadata") -> bool:
        return metadata.bad_words_token_ids is self.batch.bad_words_token_ids

    @staticmethod
    def _of(live: "LiveBatch") -> "BadWords | None":
        return live.bad_words

    @staticmethod
    def _used(metadata: "SamplingMetadata") -> bool:
        return bool(metadata.bad_words_token_ids)

    @staticmethod
    def _strip(metadata: "SamplingMetadata") -> None:
        metadata.bad_words_token_ids = {}

    def _apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        if self.kernels is None:
            assert self._tails is not None
            self._tails.mask(logits, drafts, per_draft)
            return
        assert self._addresses is not None
        ids, ends, mode, positions = self._kernel_drafts(drafts, per_draft)
        strides = row_stride(logits), logits.stride(1)
        arguments = (logits, *strides, self._addresses, ids, ends, self._width)
        grid = (len(self._addresses), self._blocks, positions)
        self.kernels.mask_kernel[grid](*arguments, MODE=mode, BLOCK=_BLOCK, num_warps=1)

    def _update_slots(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        if self.kernels is None:
            assert self._tails is not None
            self._tails.append(sampled, discarded)
            return
        assert self._addresses is not None
        arguments = (sampled, *sampled.stride(), sampled.shape[1], discarded, self._addresses)
        self.kernels.append_kernel[(len(self._addresses),)](*arguments, BLOCK=_BLOCK, num_warps=1)

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._tails = None

    def _build_slot(self, row: int) -> torch.Tensor:
        words = self._words[self.batch.req_ids[row]]
        longest = words.longest
        tail = np.full(longest, NOTHING, np.int32)
        output = self.batch.req_output_token_ids[row]
        assert output is not None
        if longest and output:
            newest = output[-longest:]
            tail[longest - len(newest) :] = newest
        if self.kernels is None:
            return self._staged(tail, torch.int32)
        header = np.array([len(words.lasts), longest], np.int32)
        begin = len(header) + longest + 3 * len(words.lasts)
        starts = begin + words.lengths.cumsum(dtype=np.int32) - words.lengths
        parts = (header, tail, words.lasts, words.lengths, starts, words.prefixes)
        return self._staged(np.concatenate(parts), torch.int32)

    def _look_up(self, metadata: "SamplingMetadata") -> None:
        """Look up the slot of each row, and rebuild the concatenated tails."""
        super()._look_up(metadata)
        words = [self._words.get(req_id) for req_id in self.batch.req_ids]
        if self.kernels is not None:
            most = max(len(of_row.lasts) for of_row in words if of_row is not None)
            self._blocks = -(-most // _BLOCK)
            return
        self._tails = tails = Tails(self._staged, words, self._rows, self._width)
        for req_id, view in zip(self.batch.req_ids, tails.views, strict=True):
            if view is not None:
                self._slots[req_id] = view


def _words(request: "CachedRequestState") -> list[list[int]]:
    params = request.sampling_params
    return [] if params is None else params.bad_words_token_ids or []


#: Entry point of the samplers.
take = BadWords.take
