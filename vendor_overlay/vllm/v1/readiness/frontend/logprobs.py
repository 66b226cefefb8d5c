"""Feature ``logprobs``: create logprob objects only when an output contains them.

Stock 0.22.0's front end creates a dict per token and an object per logprob at each step, and keeps
them until the request ends. The garbage collector traverses them repeatedly, for hundreds of
milliseconds: 128 requests with 1,000 tokens and 20 logprobs per token have 2.7 million objects. At
each step the front end also decodes the token of each logprob, even if only another request in the
batch asked for that many logprobs.

Here a request's logprobs are stored in three arrays until an output contains them. For a streamed
output, only the dicts of its own tokens are created; for a final output, the dicts of all tokens.
Each token is decoded once for all requests. A FlatLogprobs and the list in cumulative outputs,
which the client shares, are extended at each step as in stock vLLM. Clients get equal values of the
same types. Other processors, tokenizers and types fall back to upstream.
"""

# mirrors: vllm.v1.engine.logprobs:LogprobsProcessor
# mirrors: vllm.logprobs:append_logprobs_for_next_position
# mirrors: vllm.logprobs:Logprob
# mirrors: vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens

import gc
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import repeat
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from vllm import logprobs as containers
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import logprobs as upstream
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import originals, switch
from vllm.v1.readiness.frontend import token_texts

if TYPE_CHECKING:
    from vllm.logprobs import LogprobsOnePosition, PromptLogprobs, SampleLogprobs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

#: Methods of upstream's processor and functions; if any is replaced, upstream's code is used.
_METHODS = (
    *("update_from_output", "pop_prompt_logprobs", "_get_sampled_context_ids", "_verify_tokens"),
    *("_update_sample_logprobs", "_update_prompt_logprobs", "_correct_decoded_token"),
)
_FUNCTIONS = ("append_logprobs_for_next_position", "convert_ids_list_to_tokens")
#: Supported dtypes, as NumPy's characters and as torch dtypes.
_TYPES = frozenset("ilqfd")
_DTYPES = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
#: Number of preceding tokens that upstream uses to decode a partial character.
_CONTEXT = 4
#: Maximum logprobs per position to defer; more would take too long in a request's last step.
_WIDEST = 128
#: Minimum number of new objects to pause the garbage collector for.
_MANY = 2000
#: Threshold of a paused collector; it is never reached, and unlikely to be set by other code.
_NEVER = (1 << 31) - 1


class Columns:
    """Logprobs of consecutive positions in three arrays, without an object per logprob.

    Attributes:
        count: number of positions.
        width: logprobs per position; 0 without positions.
        ids, logprobs: [count * width].
        ranks: [count], ranks of the sampled tokens.
        texts: position to texts of its tokens, if any of them depends on preceding tokens.
    """

    __slots__ = ("_limit", "_types", "count", "ids", "logprobs", "ranks", "texts", "width")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit  # maximum logprobs per position; None for all
        self.clear()

    def clear(self) -> None:
        """Drop all positions."""
        self.count = self.width = 0
        self._types: tuple[np.dtype, ...] = ()
        self.ids = self.logprobs = self.ranks = array("i")
        self.texts: dict[int, tuple[str | None, ...]] = {}

    def take(self, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> bool:
        """Append ``ids`` and ``logprobs`` [positions, columns] and ``ranks`` [positions].

        Returns False if a dtype is unsupported, or the dtypes or the width have changed.
        """
        types = ids.dtype, logprobs.dtype, ranks.dtype
        width = columns = ids.shape[1]
        if self._limit is not None and self._limit < columns:
            width = self._limit
        if width != self.width or types != self._types:
            if self.count or not all(dtype.isnative and dtype.char in _TYPES for dtype in types):
                return False
            self._types, self.width = types, width
            self.ids, self.logprobs, self.ranks = (array(dtype.char) for dtype in types)
        if width != columns:
            ids, logprobs = ids[:, :width], logprobs[:, :width]
        self.ids.frombytes(ids.tobytes())
        self.logprobs.frombytes(logprobs.tobytes())
        self.ranks.frombytes(ranks.tobytes())
        self.count += len(ranks)
        return True


class Series:
    """Logprobs of a request's output or prompt.

    Attributes:
        shown: upstream's container, visible to the client.
        columns: positions that are not yet in ``shown``; None to extend ``shown`` at each step.
    """

    __slots__ = ("columns", "shown")

    def __init__(self, shown: Any, limit: int | None, deferred: bool) -> None:  # noqa: ANN401
        self.shown = shown
        narrow = limit is not None and limit <= _WIDEST
        self.columns = Columns(limit) if deferred and narrow and type(shown) is list else None


class DeferredLogprobs(upstream.LogprobsProcessor):  # type: ignore[misc]
    """Upstream's logprobs processor of a new request, with deferred logprobs."""

    def __init__(
        self,
        processor: upstream.LogprobsProcessor,
        texts: token_texts.TokenTexts | None,
        kind: RequestOutputKind,
    ) -> None:
        self._texts = texts
        self._limit = _limit(processor.num_logprobs)
        self._prompt_limit = _limit(processor.num_prompt_logprobs)
        self._deferred = kind != RequestOutputKind.CUMULATIVE
        super().__init__(
            **{field.name: getattr(processor, field.name) for field in fields(processor)}
        )

    @property
    def logprobs(self) -> "SampleLogprobs | None":
        """All logprobs of the output so far."""
        return self._all(self._sample)

    @logprobs.setter
    def logprobs(self, shown: "SampleLogprobs | None") -> None:
        self._sample = Series(shown, self._limit, self._deferred)

    @property
    def prompt_logprobs(self) -> "PromptLogprobs | None":
        """All logprobs of the prompt so far."""
        return self._all(self._prompt)

    @prompt_logprobs.setter
    def prompt_logprobs(self, shown: "PromptLogprobs | None") -> None:
        self._prompt = Series(shown, self._prompt_limit, self._deferred)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[Any, ...]]:
        """Pickle and deep-copy into upstream's processor, which gets all logprobs."""
        values = (getattr(self, field.name) for field in fields(upstream.LogprobsProcessor))
        return upstream.LogprobsProcessor, tuple(values)

    def newest(self, count: int) -> "SampleLogprobs | None":
        """Return at least the newest ``count`` positions; all for 0, like ``[-0:]``."""
        columns = self._sample.columns
        if columns is None or not 0 < count <= columns.count:
            return self.logprobs
        return self._made(self._sample, columns.count - count)

    def _update_sample_logprobs(self, logprobs_lists: "LogprobsLists") -> None:
        ids, logprobs, ranks, _ = logprobs_lists
        if not self._take(self._sample, self.num_logprobs, ids, logprobs, ranks):
            super()._update_sample_logprobs(logprobs_lists)
            return
        assert self.cumulative_logprob is not None
        for position in range(len(ranks)):
            self.cumulative_logprob += logprobs.item(position, 0)

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: "LogprobsTensors") -> None:
        tensors = prompt_logprobs_tensors[:3]
        if all(type(t) is torch.Tensor and t.is_cpu and t.dtype in _DTYPES for t in tensors):
            arrays = (tensor.numpy() for tensor in tensors)
            if self._take(self._prompt, self.num_prompt_logprobs, *arrays):
                return
        super()._update_prompt_logprobs(prompt_logprobs_tensors)

    def _take(
        self,
        series: Series,
        number: int | None,
        ids: np.ndarray,
        logprobs: np.ndarray,
        ranks: np.ndarray,
    ) -> bool:
        """Append positions to a series; False to fall back to upstream."""
        if not _in_order(ids, logprobs, ranks):
            return False
        columns = series.columns
        if columns is not None:
            taken = columns.take(ids, logprobs, ranks)
            if not taken:
                self._all(series)
                taken = columns.take(ids, logprobs, ranks)
            if taken:
                self._decode_parts(series, len(ranks))
            return taken
        assert number is not None
        width = ids.shape[1] if number == -1 else 1 + number
        rows = ids[:, :width].tolist(), logprobs[:, :width].tolist(), ranks.tolist()
        for row, values, rank in zip(*rows, strict=True):
            texts = self._decoded(row, series, 0)
            upstream.append_logprobs_for_next_position(
                series.shown, row, values, texts, rank, number
            )
        return True

    def _decode_parts(self, series: Series, count: int) -> None:
        """Decode those of the newest ``count`` positions that have partial characters.

        Such a position takes several tokenizer calls, too many to defer to the last step.
        """
        columns, known = series.columns, self._texts
        if known is None or columns is None:
            return
        width, first = columns.width, columns.count - count
        for position in range(first, columns.count):
            row = columns.ids[position * width : (position + 1) * width]
            if not known.whole.issuperset(row):
                tokens = row.tolist()
                texts = tuple(self._decoded(tokens, series, position))
                if not known.incomplete.isdisjoint(tokens):
                    columns.texts[position] = texts

    def _all(self, series: Series) -> Any:  # noqa: ANN401
        """Move all positions of a series into its container, and return it."""
        columns = series.columns
        if columns is not None and columns.count:
            series.shown.extend(self._made(series, 0))
            columns.clear()
        return series.shown

    def _made(self, series: Series, first: int) -> "list[LogprobsOnePosition]":
        """Create the dicts of all positions from ``first`` on."""
        columns = series.columns
        assert columns is not None
        width = columns.width
        ids = columns.ids[first * width :].tolist()
        logprobs = columns.logprobs[first * width :].tolist()
        ranks = columns.ranks[first:].tolist()
        if len(ids) < _MANY:
            return self._dicts(columns, first, ids, logprobs, ranks)
        with _collector.paused():
            return self._dicts(columns, first, ids, logprobs, ranks)

    def _dicts(
        self,
        columns: Columns,
        first: int,
        ids: list[int],
        logprobs: Sequence[float],
        ranks: list[int],
    ) -> "list[LogprobsOnePosition]":
        """Create the dicts of positions, of which the arrays' values have been copied."""
        width = columns.width
        texts: list[str | None] = []
        if self._texts is not None:
            texts += map(self._texts.__getitem__, ids)
            for position, parts in columns.texts.items() if columns.texts else ():
                if position >= first:
                    start = (position - first) * width
                    texts[start : start + width] = parts
        places = [*range(width)] * len(ranks)
        places[::width] = ranks
        objects = map(containers.Logprob, logprobs, places, texts or repeat(None))
        pairs = zip(ids, objects, strict=True)
        # The sampled token comes first, and may occur again among the top tokens.
        if len(ranks) == 1:
            return [dict(pairs)]
        return list(map(dict, zip(*[pairs] * width, strict=True)))

    def _decoded(self, row: list[int], series: Series, position: int) -> Iterable[str | None]:
        """Return the texts of the tokens of one position."""
        known = self._texts
        if known is None:
            return repeat(None)
        texts = [known[token] for token in row]
        if known.incomplete.isdisjoint(row):
            return texts
        shown: list[str] = self._verify_tokens(texts, row, self._context(series, position))
        return shown

    def _context(self, series: Series, position: int) -> list[int]:
        """Return up to four tokens that precede a position of ``columns``."""
        columns = series.columns
        if columns is None:
            return list(self._get_sampled_context_ids(series.shown))
        start = max(0, position - _CONTEXT)
        width = columns.width
        tokens: list[int] = columns.ids[start * width : position * width : width].tolist()
        if position < _CONTEXT:
            tokens = [*self._get_sampled_context_ids(series.shown), *tokens][-_CONTEXT:]
        return tokens


def defer(
    processor: upstream.LogprobsProcessor, params: "SamplingParams"
) -> upstream.LogprobsProcessor:
    """Return a processor that defers a new request's logprobs, or ``processor``."""
    if processor.num_logprobs is None and processor.num_prompt_logprobs is None:
        return processor
    if registry.LOGPROBS not in switch.enabled() or not _is_upstreams(processor):
        return processor
    texts = None
    if processor.tokenizer is not None:
        texts = token_texts.of(processor.tokenizer)
        if texts is None:
            return processor
    return DeferredLogprobs(processor, texts, params.output_kind)


def shown(
    processor: upstream.LogprobsProcessor, count: int, delta: bool
) -> "SampleLogprobs | None":
    """Return all logprobs; with ``delta``, at least those of the newest ``count`` tokens."""
    if delta and isinstance(processor, DeferredLogprobs):
        return processor.newest(count)
    return processor.logprobs


def is_flat(processor: upstream.LogprobsProcessor) -> bool:
    """Return whether the logprobs of an output are a FlatLogprobs."""
    if isinstance(processor, DeferredLogprobs):
        return isinstance(processor._sample.shown, containers.FlatLogprobs)
    return isinstance(processor.logprobs, containers.FlatLogprobs)


def _is_upstreams(processor: upstream.LogprobsProcessor) -> bool:
    """Return whether the processor's class, methods and functions are upstream's."""
    return (
        type(processor) is upstream.LogprobsProcessor
        and originals.all_vllms(processor, _METHODS)
        and all(map(originals.is_vllms, map(vars(upstream).get, _FUNCTIONS)))
    )


class _Collector:
    """Pauses the garbage collector by a high threshold, which leaves ``gc.enable`` usable."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._thresholds: tuple[int, int, int] = (0, 0, 0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the collector while many objects are created, none of which is garbage.

        Otherwise, collections take three quarters of a step in which all requests end.
        """
        with self._lock:
            self._pauses += 1
            if self._pauses == 1:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(_NEVER, *self._thresholds[1:])
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                # Keep a threshold that other code has set meanwhile.
                if not self._pauses and gc.get_threshold()[0] == _NEVER:
                    gc.set_threshold(*self._thresholds)


_collector = _Collector()


def _limit(number: int | None) -> int | None:
    """Return the maximum logprobs per position, with the sampled token's; None for all."""
    return None if number is None or number < 0 else 1 + number


def _in_order(ids: object, logprobs: object, ranks: object) -> bool:
    """Return whether these are arrays of consistent shapes with at least one column."""
    return (
        type(ids) is type(logprobs) is type(ranks) is np.ndarray
        and ids.ndim == 2
        and ids.shape == logprobs.shape
        and ids.shape[:1] == ranks.shape
        and ids.shape[1] > 0
    )
