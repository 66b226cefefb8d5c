"""Input batches with the same requests and bad words, upstream's and overlaid."""

from collections.abc import Sequence

import torch
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.sample.ops.bad_words import apply_bad_words, apply_bad_words_with_drafts
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from support import modules
from support.batches import Spec, drawn, empty, same_bits, state

#: Memory layouts of logits.
LAYOUTS = ("contiguous", "columns", "transposed")


class Pair:
    """An upstream and an overlaid batch with the same requests, which take the same steps.

    Args:
        vocab: size of the vocabulary.
        kernels: True for our kernels, which must be interpreted on the CPU; False for torch's
            operations.
        device: where the logits and the batches are.
        width: the logits' width, if not the vocabulary's size.

    Attributes:
        masked: number of logits masked so far.
    """

    def __init__(
        self, vocab: int, kernels: bool = False, device: str = "cpu", width: int | None = None
    ) -> None:
        self.vocab = vocab
        self.device = device
        self.width = width or vocab
        self.stock = empty(modules.pristine, vocab, device, num_spec_tokens=8)
        self.ours = empty(modules.overlaid, vocab, device, num_spec_tokens=8)
        self.bad_words = self.ours.readiness.bad_words
        self.bad_words.kernels = kernels
        self.masked = 0
        self._steps = 0
        self._joined = 0

    @property
    def req_ids(self) -> list[str]:
        """The request ids, by row."""
        return list(self.ours.req_ids)

    def join(self, words: list[list[int]], output: Sequence[int] = ()) -> str:
        """Add a request, with an output if it was preempted."""
        req_id = f"r{self._joined}"
        self._joined += 1
        spec = Spec([1, 2], list(output), {"bad_words": words})
        for batch in (self.stock, self.ours):
            batch.add_request(state(spec, req_id))
        return req_id

    def leave(self, req_id: str) -> None:
        """Remove a request; the last one takes its row."""
        for batch in (self.stock, self.ours):
            batch.remove_request(req_id)
            batch.condense()

    def swap(self, one: int, other: int) -> None:
        """Swap two rows."""
        for batch in (self.stock, self.ours):
            batch.swap_states(one, other)

    def cut(self, req_id: str, kept: int) -> None:
        """Cut an output back, as the runner does."""
        self.ours.readiness.cut(req_id, kept)
        for batch in (self.stock, self.ours):
            del batch.req_output_token_ids[batch.req_id_to_index[req_id]][kept:]

    def refresh(self) -> None:
        """Refresh the metadata after a change, as the runner does."""
        for batch in (self.stock, self.ours):
            batch.refresh_metadata()

    def outputs(self) -> list[list[int]]:
        """Each row's output."""
        return [list(output) for output in self.stock.req_output_token_ids]

    def check(self, spread: list[list[int]] | None = None, layout: str = "contiguous") -> None:
        """Require both to mask the same logits; with drafts, those of bonus and target rows.

        Args:
            spread: each row's drafts; None for a step without drafts.
            layout: one of :data:`LAYOUTS`.
        """
        self._steps += 1
        words = self.stock.sampling_metadata.bad_words_token_ids
        rows = self.outputs()
        drafts = None
        if spread is not None:
            drafts = SpecDecodeMetadata.make_dummy(spread, torch.device(self.device))
            rows = modules.pristine(modules.SAMPLER).Sampler._combine_outputs_with_spec_tokens(
                rows, spread
            )
        logits, expected = self.logits(len(rows), layout)
        self._prepare(logits, drafts)
        applied = BadWords.take(self.ours.sampling_metadata, logits)[0]
        assert applied is (self.bad_words if words else None)
        before = expected.clone()
        if applied is not None:
            applied.apply(logits, drafts, per_draft=False)
        apply_bad_words(expected, words, rows)
        self._compare(logits, expected, before)
        if drafts is None or spread is None:
            return
        sampler = modules.pristine(modules.REJECTION_SAMPLER).RejectionSampler
        rows = sampler._combine_outputs_with_spec_tokens(self.outputs(), spread)
        logits, expected = self.logits(len(rows), layout)
        before = expected.clone()
        applied = BadWords.take(self.ours.sampling_metadata, logits, drafts)[0]
        assert applied is (self.bad_words if words else None)
        if applied is not None:
            applied.apply(logits, drafts, per_draft=True)
        apply_bad_words_with_drafts(expected, words, rows, [len(ids) for ids in spread])
        self._compare(logits, expected, before)

    def _prepare(self, logits: torch.Tensor, drafts: SpecDecodeMetadata | None) -> None:
        self.ours.readiness.history.begin_step()
        self.ours.readiness.begin_sampling(logits, drafts)

    def sample(self, tokens: list[list[int]], discarded: Sequence[int] = ()) -> None:
        """Record a step's sampled tokens by row; those of discarded rows do not count."""
        widest = max(map(len, tokens))
        padded = [ids + [-1] * (widest - len(ids)) for ids in tokens]
        sampled = torch.tensor(padded, dtype=torch.int32, device=self.device)
        mask = torch.zeros(16, dtype=torch.bool)
        mask[list(discarded)] = True
        if not self.bad_words.serving:
            self._prepare(self.logits(len(tokens), "contiguous")[0], None)
        self.ours.readiness.observe_sampled(sampled, mask.to(self.device))
        for batch in (self.stock, self.ours):
            for row, ids in enumerate(tokens):
                if row not in discarded:
                    batch.req_output_token_ids[row].extend(ids)

    def logits(self, rows: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the bits of [rows, width] float32, and return them twice, first in ``layout``."""
        values = drawn(rows * self.width, torch.float32, self._steps).to(self.device)
        values = values.view(rows, self.width)
        logits = torch.empty_like(values)
        if layout == "columns":
            logits = torch.empty((rows, self.width + 3), device=self.device)[:, : self.width]
        if layout == "transposed":
            logits = torch.empty((self.width, rows), device=self.device).t()
        return logits.copy_(values), values

    def _compare(self, ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> None:
        assert same_bits(ours, theirs)
        self.masked += int((theirs.view(torch.int32) != before.view(torch.int32)).sum())
