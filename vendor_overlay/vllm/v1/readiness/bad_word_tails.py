"""Bad words off CUDA: the words and tails of all rows at once, by torch's operations.

How many operations a step takes depends on neither rows nor words, and none waits for the
device. What lies where is worked out on the host when the batch changes, or the number of
drafts does.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

#: The largest token id that a tail can hold.
MAX_ID = int(np.iinfo(np.int32).max)
#: Stands in a tail for what the output is too short for; no word holds it.
NOTHING = -1
#: Numbers of drafts by row to keep the plans of: they are few where drafts are full.
_PLANS = 8


class Words(NamedTuple):
    """Bad words, one behind the other; all int32.

    Attributes:
        lasts: [words] each word's last token.
        lengths: [words] how many tokens go before that.
        prefixes: [sum of ``lengths``] those tokens, word by word.
    """

    lasts: np.ndarray
    lengths: np.ndarray
    prefixes: np.ndarray

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "Words":
        """Words as lists of ids from 0 to the largest int32, none empty."""
        lasts = np.fromiter((word[-1] for word in words), np.int32, len(words))
        lengths = np.fromiter(map(len, words), np.int32, len(words)) - 1
        before = chain.from_iterable(word[:-1] for word in words)
        return cls(lasts, lengths, np.fromiter(before, np.int32, int(lengths.sum())))

    @property
    def longest(self) -> int:
        """How many tokens go before the last one of the longest word."""
        return int(self.lengths.max())

    def below(self, width: int) -> "Words":
        """Those whose last token is below ``width``."""
        kept = self.lasts < width
        if kept.all():
            return self
        return Words(
            self.lasts[kept], self.lengths[kept], self.prefixes[np.repeat(kept, self.lengths)]
        )


class _Plan(NamedTuple):
    """What to compare and what to mask, for one way that drafts are spread over the rows.

    Each word counts once for every position that its row has. Equal words, and words of one
    position with the same last token, share a target, so that each element of the logits is
    written once.

    Attributes:
        wanted: [tokens] int32: the tokens before the last, of all words.
        at: [tokens] int64: where in the tails, and the drafts behind them, each should be.
        words: [tokens] int64: the word of each.
        lengths: [words] int32: how many tokens each word has in ``wanted``.
        targets: [words] int64: the target of each.
        positions: [targets] int64: row of the logits.
        columns: [targets] int64: the last token.
    """

    wanted: torch.Tensor
    at: torch.Tensor
    words: torch.Tensor
    lengths: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor


class Tails:
    """The tails of all rows in one tensor, for torch's operations.

    Args:
        upload: brings an array to the device, with a dtype.
        words: [rows] each row's words, None for a row without.
        tails: [rows] each row's tail, int32, None for a row without.
        width: of the logits.

    Attributes:
        views: as ``tails``: each row's part of the tensor, which is kept up to date.
    """

    def __init__(
        self,
        upload: Callable[[np.ndarray, torch.dtype], torch.Tensor],
        words: Sequence[Words | None],
        tails: Sequence[torch.Tensor | None],
        width: int,
    ) -> None:
        self._to_device = upload
        held = [tail for tail in tails if tail is not None]
        self._tokens = torch.cat(held)
        parts = iter(self._tokens.split([len(tail) for tail in held]))
        self.views = [None if tail is None else next(parts) for tail in tails]

        sizes = np.array([0 if tail is None else len(tail) for tail in tails])
        self._ends = sizes.cumsum()
        rows = np.repeat(np.arange(len(sizes)), sizes)
        entries = np.arange(len(rows))
        self._rows = self._upload(rows)
        self._entries = self._upload(entries)
        #: How far each entry is behind the newest of its row; 0 for that one.
        self._ages = self._upload(self._ends[rows] - 1 - entries)

        kept = [None if each is None else each.below(width) for each in words]
        counts = np.array([0 if each is None else len(each.lasts) for each in kept])
        lasts, lengths, prefixes = (
            np.concatenate([each[part] for each in kept if each is not None]) for part in range(3)
        )
        row_of_word = np.repeat(np.arange(len(counts)), counts)
        pairs, target_of_word = np.unique(row_of_word * (MAX_ID + 1) + lasts, return_inverse=True)
        word_of_token = np.repeat(np.arange(len(lasts)), lengths)
        self._columns = pairs % (MAX_ID + 1)
        self._lengths = lengths
        self._wanted = prefixes
        self._targets_of = _Groups(pairs // (MAX_ID + 1), len(counts))
        self._words_of = _Groups(row_of_word, len(counts))
        self._tokens_of = _Groups(row_of_word[word_of_token], len(counts))
        self._target_of_word = target_of_word
        self._word_of_token = word_of_token
        #: How far before the last token of its word each token is, 1 at least.
        ends = lengths.cumsum()
        self._before = ends[word_of_token] - np.arange(len(prefixes))
        self._plans: dict[object, _Plan] = {}

    def mask(self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", each: bool) -> None:
        """Mask what would complete a word, in place.

        Args:
            logits: [positions, width].
            drafts: the drafts that count; None: none does.
            each: the positions are those of the drafts; else each follows a row's last.
        """
        plan = self._plan(drafts, each)
        known = self._tokens
        if drafts is not None:
            known = torch.cat((known, drafts.draft_token_ids.to(torch.int32)))
        equal = (known[plan.at] == plan.wanted).to(torch.int32)
        matched = torch.zeros_like(plan.lengths).index_add_(0, plan.words, equal) == plan.lengths
        hits = plan.lengths.new_zeros(len(plan.columns))
        hits.index_add_(0, plan.targets, matched.to(torch.int32))
        values = logits[plan.positions, plan.columns]
        values.masked_fill_(hits > 0, float("-inf"))
        logits[plan.positions, plan.columns] = values

    def append(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Append what was sampled; see :meth:`BadWords.record`."""
        if not len(self._tokens):
            return
        count, width = sampled.shape
        given = (sampled >= 0).to(torch.int64).cumprod(1).sum(1)
        given.masked_fill_(discarded[:count], 0)
        given = given[self._rows]
        # What was sampled lies behind the tails, row by row.
        new = len(self._tokens) + self._rows * width + given - 1 - self._ages
        source = torch.where(self._ages < given, new, self._entries + given)
        known = torch.cat((self._tokens, sampled.flatten().to(torch.int32)))
        torch.index_select(known, 0, source, out=self._tokens)

    def _plan(self, drafts: "SpecDecodeMetadata | None", each: bool) -> _Plan:
        """The plan for these drafts; where they lie is known on the host."""
        spread = None if drafts is None else tuple(drafts.num_draft_tokens)
        if (spread, each) not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[spread, each] = self._made(np.array(spread or [0] * len(self._ends)), each)
        return self._plans[spread, each]

    def _made(self, drafts: np.ndarray, each: bool) -> _Plan:
        """The plan for [rows] numbers of drafts."""
        starts = drafts.cumsum() - drafts
        if each:
            rows = np.repeat(np.arange(len(drafts)), drafts)
            seen = np.arange(len(rows)) - starts[rows]
        else:
            rows, seen = np.arange(len(drafts)), drafts
        tokens, token_position, _ = self._tokens_of.take(rows)
        words, word_position, word_base = self._words_of.take(rows)
        targets, target_position, target_base = self._targets_of.take(rows)
        row = rows[token_position]
        ago = seen[token_position] - self._before[tokens]
        at = np.where(ago < 0, self._ends[row], self._ends[-1] + starts[row]) + ago
        return _Plan(
            wanted=self._upload(self._wanted[tokens], torch.int32),
            at=self._upload(at),
            words=self._upload(self._word_of_token[tokens] + word_base[token_position]),
            lengths=self._upload(self._lengths[words], torch.int32),
            targets=self._upload(self._target_of_word[words] + target_base[word_position]),
            positions=self._upload(target_position),
            columns=self._upload(self._columns[targets]),
        )

    def _upload(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self._to_device(values, dtype)


class _Groups:
    """Things that belong to rows, sorted by row.

    Args:
        rows: [things] the row of each.
        count: how many rows there are.
    """

    def __init__(self, rows: np.ndarray, count: int) -> None:
        self._counts = np.bincount(rows, minlength=count)
        self._starts = self._counts.cumsum() - self._counts

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The things of these rows, one row's after another's.

        Returns:
            Which thing each is, which of ``rows`` it is taken for, and by position in
            ``rows``, how much further on things are than they were.
        """
        counts = self._counts[rows]
        shifts = counts.cumsum() - counts - self._starts[rows]
        positions = np.repeat(np.arange(len(rows)), counts)
        return np.arange(len(positions)) - shifts[positions], positions, shifts
