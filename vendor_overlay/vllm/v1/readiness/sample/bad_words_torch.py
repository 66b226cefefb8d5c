"""Bad words by PyTorch's operations, for devices without the Triton kernels (CPU, ROCm, XPU).

The words of all rows are compared with the tails at once. The number of ops per step is independent
of the number of rows and words, and no op syncs with the device. The indices that the ops need are
computed on the host when the batch or its numbers of drafts change.
"""

# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words
# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words_with_drafts
# mirrors: vllm.v1.sample.ops.bad_words:_apply_bad_words_single_batch
# mirrors: vllm.v1.sample.ops.bad_words:_SMALLEST_LOGIT

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

#: Largest token id that a tail can hold.
MAX_ID = int(np.iinfo(np.int32).max)
#: Padding of a tail that is longer than the output; no word contains this id.
NOTHING = -1
#: Maximum number of cached plans, one per tuple of draft counts. Few occur if most rows get the
#: maximum number of drafts.
_PLANS = 8


class Words(NamedTuple):
    """Bad words of one request, split into a last token and a prefix, which may be empty."""

    lasts: np.ndarray  # int32 [words], last tokens
    lengths: np.ndarray  # int32 [words], lengths of the prefixes
    prefixes: np.ndarray  # int32 [sum of lengths], word by word

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "Words":
        """Convert words, which are non-empty lists of ids from 0 to :data:`MAX_ID`."""
        lasts = np.fromiter((word[-1] for word in words), np.int32, len(words))
        lengths = np.fromiter(map(len, words), np.int32, len(words)) - 1
        prefixes = chain.from_iterable(word[:-1] for word in words)
        return cls(lasts, lengths, np.fromiter(prefixes, np.int32, int(lengths.sum())))

    @property
    def longest(self) -> int:
        """Length of the longest prefix, which is also the length of the tail."""
        return int(self.lengths.max())

    def below(self, width: int) -> "Words":
        """Return the words whose last token is below ``width``."""
        mask = self.lasts < width
        if mask.all():
            return self
        return Words(
            self.lasts[mask], self.lengths[mask], self.prefixes[np.repeat(mask, self.lengths)]
        )


class _Plan(NamedTuple):
    """Indices of tokens to compare and of logits to mask, for given draft counts per row.

    A word has one entry per position of its row. A target is an element of the logits; words that
    mask the same element share the target.
    """

    prefixes: torch.Tensor  # int32 [tokens], the prefixes of all words
    sources: torch.Tensor  # int64 [tokens], index of the compared token in tails and drafts
    words: torch.Tensor  # int64 [tokens], the token's word
    lengths: torch.Tensor  # int32 [words], the word's number of tokens in prefixes
    targets: torch.Tensor  # int64 [words], the word's target
    positions: torch.Tensor  # int64 [targets], row of the logits
    columns: torch.Tensor  # int64 [targets], last token


class Tails:
    """Tails of all rows, concatenated in one tensor.

    ``upload`` sends an array, by default as int64. ``words`` and ``tails`` (int32) have an item per
    row, None without bad words. ``width`` is the number of columns of the logits. ``views`` are
    each row's part of the concatenated tensor, which is updated in place.
    """

    def __init__(
        self,
        upload: Callable[..., torch.Tensor],
        words: Sequence[Words | None],
        tails: Sequence[torch.Tensor | None],
        width: int,
    ) -> None:
        self._upload = upload
        present = [tail for tail in tails if tail is not None]
        self._tokens = torch.cat(present)
        parts = iter(self._tokens.split([len(tail) for tail in present]))
        self.views = [None if tail is None else next(parts) for tail in tails]

        sizes = np.array([0 if tail is None else len(tail) for tail in tails])
        self._ends = sizes.cumsum()
        rows = np.repeat(np.arange(len(sizes)), sizes)
        entries = np.arange(len(rows))
        self._rows = self._upload(rows)
        self._entries = self._upload(entries)
        #: Number of newer entries in the same row, for each entry.
        self._ages = self._upload(self._ends[rows] - 1 - entries)

        valid = [None if of_row is None else of_row.below(width) for of_row in words]
        counts = np.array([0 if of_row is None else len(of_row.lasts) for of_row in valid])
        lasts, lengths, prefixes = (
            np.concatenate([of_row[part] for of_row in valid if of_row is not None])
            for part in range(3)
        )
        row_of_word = np.repeat(np.arange(len(counts)), counts)
        pairs, target_of_word = np.unique(row_of_word * (MAX_ID + 1) + lasts, return_inverse=True)
        word_of_token = np.repeat(np.arange(len(lasts)), lengths)
        self._columns = pairs % (MAX_ID + 1)
        self._lengths = lengths
        self._prefixes = prefixes
        self._targets_by_row = _Groups(pairs // (MAX_ID + 1), len(counts))
        self._words_by_row = _Groups(row_of_word, len(counts))
        self._tokens_by_row = _Groups(row_of_word[word_of_token], len(counts))
        self._target_of_word = target_of_word
        self._word_of_token = word_of_token
        #: Distance (at least 1) of each prefix token from the last token of its word.
        ends = lengths.cumsum()
        self._distances = ends[word_of_token] - np.arange(len(prefixes))
        self._plans: dict[tuple[tuple[int, ...] | None, bool], _Plan] = {}

    def mask(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        """Mask in place the tokens that would complete a word, in logits [positions, width].

        With ``per_draft``, these are target logits, one position per draft. Otherwise there is one
        position per row, after all of its drafts.
        """
        plan = self._plan(drafts, per_draft)
        tokens = self._tokens
        if drafts is not None:
            tokens = torch.cat((tokens, drafts.draft_token_ids.to(torch.int32)))
        equal = (tokens[plan.sources] == plan.prefixes).to(torch.int32)
        matched = torch.zeros_like(plan.lengths).index_add_(0, plan.words, equal) == plan.lengths
        matches = plan.lengths.new_zeros(len(plan.columns))
        matches.index_add_(0, plan.targets, matched.to(torch.int32))
        values = logits[plan.positions, plan.columns]
        values.masked_fill_(matches > 0, float("-inf"))
        logits[plan.positions, plan.columns] = values

    def append(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Append ``sampled`` [rows, tokens] up to a negative id; skip ``discarded`` rows."""
        if not len(self._tokens):
            return
        rows, width = sampled.shape
        added = (sampled >= 0).to(torch.int64).cumprod(1).sum(1)
        added.masked_fill_(discarded[:rows], 0)
        added = added[self._rows]
        new = len(self._tokens) + self._rows * width + added - 1 - self._ages
        sources = torch.where(self._ages < added, new, self._entries + added)
        # All sampled tokens come after all tails.
        tokens = torch.cat((self._tokens, sampled.flatten().to(torch.int32)))
        torch.index_select(tokens, 0, sources, out=self._tokens)

    def _plan(self, drafts: "SpecDecodeMetadata | None", per_draft: bool) -> _Plan:
        """Return the plan for the numbers of drafts per row, cached if possible."""
        counts = None if drafts is None else tuple(drafts.num_draft_tokens)
        key = counts, per_draft
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = self._make_plan(np.array(counts or [0] * len(self._ends)), per_draft)
        return self._plans[key]

    def _make_plan(self, drafts: np.ndarray, per_draft: bool) -> _Plan:
        """Build the plan for ``drafts`` [rows], the number of drafts per row."""
        starts = drafts.cumsum() - drafts
        if per_draft:
            rows = np.repeat(np.arange(len(drafts)), drafts)
            preceding = np.arange(len(rows)) - starts[rows]
        else:
            rows, preceding = np.arange(len(drafts)), drafts
        tokens, token_position, _ = self._tokens_by_row.gather(rows)
        words, word_position, word_offset = self._words_by_row.gather(rows)
        targets, target_position, target_offset = self._targets_by_row.gather(rows)
        row = rows[token_position]
        # Index relative to the row's first draft; a negative index is in the tail.
        index = preceding[token_position] - self._distances[tokens]
        sources = np.where(index < 0, self._ends[row], self._ends[-1] + starts[row]) + index
        return _Plan(
            prefixes=self._upload(self._prefixes[tokens], torch.int32),
            sources=self._upload(sources),
            words=self._upload(self._word_of_token[tokens] + word_offset[token_position]),
            lengths=self._upload(self._lengths[words], torch.int32),
            targets=self._upload(self._target_of_word[words] + target_offset[word_position]),
            positions=self._upload(target_position),
            columns=self._upload(self._columns[targets]),
        )


class _Groups:
    """Items sorted by row; ``rows`` [items] are their rows, each below ``count``."""

    def __init__(self, rows: np.ndarray, count: int) -> None:
        self._counts = np.bincount(rows, minlength=count)
        self._starts = self._counts.cumsum() - self._counts

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gather the items of ``rows`` [groups], which may contain a row several times.

        Returns:
            The index and the group of each gathered item, [items] each; and the offset of
            each group between its old and new place, [groups].
        """
        counts = self._counts[rows]
        offsets = counts.cumsum() - counts - self._starts[rows]
        groups = np.repeat(np.arange(len(rows)), counts)
        return np.arange(len(groups)) - offsets[groups], groups, offsets
