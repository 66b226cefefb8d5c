"""Bad words matched and masked on the device.

Upstream compares the end of every output with every word in Python lists on each step, for
which the host must wait for the newest token. Here each request with bad words holds a slot
on the device: its words, and its tail, which is as much of the newest output as its longest
word needs. Sampled tokens are appended there as they are sampled, and what would complete a
word is masked there.

Bit for bit what upstream's ``apply_bad_words`` makes of the logits: it writes minus infinity
and reads nothing. The prompt counts for nothing, and a token beyond the logits is passed over.

Off CUDA torch's operations do the same for all words of the batch at once. The tails of all
rows then are one tensor, and a slot is no more than a view of its part.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness.slots import Slots

if TYPE_CHECKING:
    from vllm.v1.readiness.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = init_logger(__name__)

_MAX_ID = np.iinfo(np.int32).max
#: Stands in a tail for what the output is too short for; no word holds it.
_NOTHING = -1
_BLOCK = 32


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


class BadWords(Slots):
    """The bad words of one batch."""

    owner = "bad words"

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch, history)
        if current_platform.is_cuda():
            from vllm.v1.readiness import bad_word_kernels

            self.kernels = bad_word_kernels
        self._words: dict[str, Words] = {}
        #: Requests with words that upstream alone knows how to read.
        self._odd: set[str] = set()
        self._width = self.vocab_size
        self._blocks = 0
        self._tails: _Tails | None = None

    def warm_up(self) -> None:
        """Compile and load the kernels, which would otherwise stall the first request."""
        if self.kernels is None:
            return
        addresses = torch.zeros(1, dtype=torch.int64, device=self.device)
        # The strides of real logits without their memory; an address of 0 reads nothing.
        logits = torch.zeros(1, dtype=torch.float32, device=self.device)
        logits = logits.as_strided((1, 1), (self.vocab_size, 1))
        ids = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        discarded = torch.zeros(1, dtype=torch.bool, device=self.device)
        modes = {self.kernels.PLAIN: addresses, self.kernels.TARGET: ids, self.kernels.BONUS: ids}
        for mode, drafts in modes.items():
            self._launch(logits, addresses, mode, drafts, drafts, (1, 1))
        self._launch_append(ids, discarded, addresses)

    def add_request(self, request: "CachedRequestState") -> None:
        """Take note of a request that joins the batch."""
        params = request.sampling_params
        if params is None or not params.bad_words_token_ids:
            return
        words = params.bad_words_token_ids
        if all(word and min(word) >= 0 and max(word) <= _MAX_ID for word in words):
            self._words[request.req_id] = Words.of(words)
            self._slots[request.req_id] = None
        else:
            self._odd.add(request.req_id)

    def remove_request(self, req_id: str) -> None:
        """Give back the slot of a request that leaves the batch."""
        super().remove_request(req_id)
        self._words.pop(req_id, None)
        self._odd.discard(req_id)

    def prepare(
        self,
        metadata: "SamplingMetadata",
        width: int,
        drafts: "SpecDecodeMetadata | None",
    ) -> None:
        """Make the slots ready for a step; :attr:`serving` says whether they are.

        Args:
            metadata: the live batch's.
            width: of the step's logits.
            drafts: the step's drafts, if it has any.
        """
        # Of tokens beyond the vocabulary upstream drops some, depending on how they came.
        if not metadata.bad_words_token_ids or self._odd or width > self.vocab_size:
            self._forget_rows()
            return
        if width != self._width:
            self._forget_rows()
            self._width = width
        rows = self._rows
        self._serve(metadata, drafts)
        if self.serving and self._rows is not rows:
            self._join()

    def recognises(
        self,
        metadata: "SamplingMetadata",
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
    ) -> bool:
        """Whether the slots hold the words and history of ``metadata`` and ``logits``.

        Args:
            metadata: any sampling metadata with the live batch's rows.
            logits: [positions, vocab].
            drafts: the drafts that the positions are those of; None: of the requests.
        """
        positions = len(self._rows) if drafts is None else len(drafts.draft_token_ids)
        return (
            self.serving
            and metadata.bad_words_token_ids is self.batch.bad_words_token_ids
            and logits.shape == (positions, self._width)
            and logits.device.type == self.device.type
        )

    def apply(self, logits: torch.Tensor, after_drafts: bool) -> None:
        """Mask what would complete a bad word, in place.

        Args:
            logits: [requests, width], one row a request.
            after_drafts: the rows follow the drafts of the step, if it has any (bonus
                tokens).
        """
        drafts = self._drafts if after_drafts else None
        if self.kernels is not None:
            mode = self.kernels.PLAIN if drafts is None else self.kernels.BONUS
            self._mask(logits, mode, drafts, 1)
            return
        assert self._tails is not None
        self._tails.mask(logits, drafts, each=False)

    def apply_to_targets(self, logits: torch.Tensor, drafts: "SpecDecodeMetadata") -> None:
        """Mask what would complete a bad word where drafts are verified, in place.

        Args:
            logits: [drafts of all requests, width]: for each draft the position it was
                made for, which follows the drafts before it.
            drafts: the drafts.
        """
        if self.kernels is not None:
            self._mask(logits, self.kernels.TARGET, drafts, drafts.max_spec_len)
            return
        assert self._tails is not None
        self._tails.mask(logits, drafts, each=True)

    def record(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Append what was sampled to the tails.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; a row ends at its
                first negative id (-1: rejected).
            discarded: [at least requests] bool on the device: rows sampled for nothing.
        """
        if not self.serving:
            return
        if self.kernels is not None:
            assert self._addresses is not None
            self._launch_append(sampled, discarded, self._addresses)
            return
        assert self._tails is not None
        self._tails.append(sampled, discarded)

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._tails = None

    def _say_no_room(self) -> None:
        logger.warning_once(
            "Readiness overlay: no room on the device for the bad words of every request. "
            "While that is so, vLLM's own path serves them, which waits on every step. Lower "
            "gpu_memory_utilization or max_num_seqs."
        )

    def _count_history(self, row: int) -> torch.Tensor:
        words = self._words[self.batch.req_ids[row]]
        longest = words.longest
        tail = np.full(longest, _NOTHING, np.int32)
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

    def _join(self) -> None:
        """Make ready what the rows have in common."""
        words = [self._words.get(req_id) for req_id in self.batch.req_ids]
        if self.kernels is not None:
            most = max(len(each.lasts) for each in words if each is not None)
            self._blocks = -(-most // _BLOCK)
            return
        self._tails = tails = _Tails(self, words, self._rows, self._width)
        for req_id, view in zip(self.batch.req_ids, tails.views, strict=True):
            if view is not None:
                self._slots[req_id] = view

    def _mask(
        self,
        logits: torch.Tensor,
        mode: int,
        drafts: "SpecDecodeMetadata | None",
        positions: int,
    ) -> None:
        assert self._addresses is not None
        ids = ends = self._addresses
        if drafts is not None:
            ids, ends = drafts.draft_token_ids, drafts.cu_num_draft_tokens
        self._launch(logits, self._addresses, mode, ids, ends, (self._blocks, positions))

    def _launch(
        self,
        logits: torch.Tensor,
        addresses: torch.Tensor,
        mode: int,
        drafts: torch.Tensor,
        drafts_end: torch.Tensor,
        grid: tuple[int, int],
    ) -> None:
        assert self.kernels is not None
        self.kernels.mask_kernel[(len(addresses), *grid)](
            logits,
            *logits.stride(),
            addresses,
            drafts,
            drafts_end,
            self._width,
            MODE=mode,
            BLOCK=_BLOCK,
            num_warps=1,
        )

    def _launch_append(
        self, sampled: torch.Tensor, discarded: torch.Tensor, addresses: torch.Tensor
    ) -> None:
        assert self.kernels is not None
        self.kernels.append_kernel[(len(addresses),)](
            sampled,
            *sampled.stride(),
            sampled.shape[1],
            discarded,
            addresses,
            BLOCK=_BLOCK,
            num_warps=1,
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


class _Tails:
    """The tails of all rows in one tensor, for torch's operations.

    Args:
        slots: whose they are.
        words: [rows] each row's words, None for a row without.
        tails: [rows] each row's tail, int32, None for a row without.
        width: of the logits.

    Attributes:
        views: as ``tails``: each row's part of the tensor, which is kept up to date.
    """

    def __init__(
        self,
        slots: BadWords,
        words: Sequence[Words | None],
        tails: Sequence[torch.Tensor | None],
        width: int,
    ) -> None:
        self._slots = slots
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
        pairs, target_of_word = np.unique(row_of_word * (_MAX_ID + 1) + lasts, return_inverse=True)
        word_of_token = np.repeat(np.arange(len(lasts)), lengths)
        self._columns = pairs % (_MAX_ID + 1)
        self._lengths = lengths
        self._wanted = prefixes
        self._targets_of = _Groups(pairs // (_MAX_ID + 1), len(counts))
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
            if len(self._plans) > 8:
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
        return self._slots._staged(values, dtype)


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
