"""Feature ``logprobs``: a client's logprobs are made when they are given to the client.

In 0.22.0 the front end makes a dict for each token and an object for each of its logprobs, and
keeps them until the request is over. The garbage collector walks them all again and again, for
hundreds of milliseconds: 128 requests of 1,000 tokens with 20 logprobs are 2.7 million objects.
It decodes each of their tokens anew, also where another request in the batch asked for more
logprobs than this one, and those are thrown away.

Here a request's logprobs are three arrays until an output shows them. An output that streams
gets the dicts of its own tokens; one that comes at the end gets all of them. Each token is
decoded once for all requests. Outputs that hold everything up to the newest token share one
growing list with the client, which is filled at every step as before, and so are FlatLogprobs.

What a client is given is the same, of the same types. Unknown processors, tokenizers and values
are left to upstream.
"""

# mirrors: vllm.v1.engine.logprobs:LogprobsProcessor
# mirrors: vllm.logprobs:append_logprobs_for_next_position
# mirrors: vllm.logprobs:Logprob
# mirrors: vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens

import gc
import threading
from array import array
from collections.abc import Iterable, Iterator
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
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.readiness.frontend import token_texts

if TYPE_CHECKING:
    from vllm.logprobs import LogprobsOnePosition, PromptLogprobs, SampleLogprobs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

#: Of upstream's processor; with others the processor is somebody's own.
_METHODS = (
    "update_from_output",
    "pop_prompt_logprobs",
    "_update_sample_logprobs",
    "_update_prompt_logprobs",
    "_get_sampled_context_ids",
    "_correct_decoded_token",
    "_verify_tokens",
)
_FUNCTIONS = ("append_logprobs_for_next_position", "convert_ids_list_to_tokens")
#: Types of values that an array can hold.
_TYPES = frozenset("ilqfd")
_DTYPES = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
#: Tokens before an incomplete one that upstream looks at.
_CONTEXT = 4
#: Logprobs of a position; with more, what a request's end would take is too long.
_WIDEST = 128
#: Objects that the collector would walk more than once while they are made.
_MANY = 2000
#: Objects at which a paused collector would walk: more than there can be, and no usual setting.
_NEVER = (1 << 31) - 1


class Columns:
    """Positions of one width that are in no list yet: three objects for the collector in all.

    Args:
        limit: logprobs of a position that are kept; None for all.

    Attributes:
        count: number of positions.
        width: logprobs a position, once there is one.
        ids, logprobs: [count * width].
        ranks: [count], of the sampled tokens.
        texts: position to its texts, where they depend on the tokens before.
    """

    __slots__ = ("_limit", "_types", "count", "ids", "logprobs", "ranks", "texts", "width")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Drop all positions."""
        self.count = self.width = 0
        self._types: tuple[np.dtype, ...] = ()
        self.ids = self.logprobs = self.ranks = array("i")
        self.texts: dict[int, tuple[str | None, ...]] = {}

    def take(self, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray) -> bool:
        """Take in positions.

        Args:
            ids: [positions, columns].
            logprobs: [positions, columns].
            ranks: [positions].

        Returns:
            True if handled here; False if they are unlike those before, or no array holds them.
        """
        types = ids.dtype, logprobs.dtype, ranks.dtype
        width = columns = ids.shape[1]
        if self._limit is not None and self._limit < columns:
            width = self._limit
        if width != self.width or types != self._types:
            if self.count or not all(one.isnative and one.char in _TYPES for one in types):
                return False
            self._types, self.width = types, width
            self.ids, self.logprobs, self.ranks = (array(one.char) for one in types)
        if width != columns:
            ids, logprobs = ids[:, :width], logprobs[:, :width]
        self.ids.frombytes(ids.tobytes())
        self.logprobs.frombytes(logprobs.tobytes())
        self.ranks.frombytes(ranks.tobytes())
        self.count += len(ranks)
        return True


class Series:
    """The logprobs of a request's output or of its prompt.

    Attributes:
        shown: upstream's container: what a client was given, or may look into at any time.
        columns: the positions behind those; None if all are to be in ``shown`` at once.
    """

    __slots__ = ("columns", "shown")

    def __init__(self, shown: Any, limit: int | None, deferred: bool) -> None:  # noqa: ANN401
        self.shown = shown
        narrow = limit is not None and limit <= _WIDEST
        self.columns = Columns(limit) if deferred and narrow and type(shown) is list else None


class DeferredLogprobs(upstream.LogprobsProcessor):  # type: ignore[misc]
    """Upstream's processor, with logprobs that are made when they are asked for.

    Args:
        processor: that of a new request.
        texts: of the request's tokenizer; None if it has none.
        kind: which outputs the request has.
    """

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
        """All logprobs of the output up to now."""
        return self._all(self._sample)

    @logprobs.setter
    def logprobs(self, shown: "SampleLogprobs | None") -> None:
        self._sample = Series(shown, self._limit, self._deferred)

    @property
    def prompt_logprobs(self) -> "PromptLogprobs | None":
        """All logprobs of the prompt up to now."""
        return self._all(self._prompt)

    @prompt_logprobs.setter
    def prompt_logprobs(self, shown: "PromptLogprobs | None") -> None:
        self._prompt = Series(shown, self._prompt_limit, self._deferred)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[Any, ...]]:
        """Stand in for the processor in pickles and deep copies: upstream's, with all logprobs."""
        values = (getattr(self, field.name) for field in fields(upstream.LogprobsProcessor))
        return upstream.LogprobsProcessor, tuple(values)

    def newest(self, count: int) -> "SampleLogprobs | None":
        """Return logprobs that end with those of the newest positions.

        Args:
            count: positions that are needed; 0 for all, as a slice from -0 has it.
        """
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
        if all(map(_is_readable, tensors)):
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
        """Take positions into a series, or into its container at once.

        Returns:
            True if handled here; False to fall back to upstream.
        """
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
        """Decode the newest positions where a token is a part of a character.

        Such a token takes several calls of the tokenizer, as on stock; all those of a request
        would hold up its last step.
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
        """Move all positions of a series into its container, and return that."""
        columns = series.columns
        if columns is not None and columns.count:
            series.shown.extend(self._made(series, 0))
            columns.clear()
        return series.shown

    def _made(self, series: Series, first: int) -> "list[LogprobsOnePosition]":
        """Make what a client is shown of the positions from ``first`` on."""
        columns = series.columns
        assert columns is not None
        width = columns.width
        ids = columns.ids[first * width :].tolist()
        logprobs = columns.logprobs[first * width :].tolist()
        ranks = columns.ranks[first:].tolist()
        places = [*range(width)] * len(ranks)
        places[::width] = ranks
        with _collector.paused(len(ids)):
            texts: list[str | None] = []
            if self._texts is not None:
                texts += map(self._texts.__getitem__, ids)
                for position, parts in columns.texts.items():
                    if position >= first:
                        start = (position - first) * width
                        texts[start : start + width] = parts
            objects = map(containers.Logprob, logprobs, places, texts or repeat(None))
            pairs = zip(ids, objects, strict=True)
            # The sampled token comes first, and may come again among the likeliest.
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
        """Return the tokens of the output just before a position that is in no list yet."""
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
    """Return the processor of a new request's logprobs; the one given to fall back to upstream."""
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
    """Return a request's logprobs for an output.

    Args:
        processor: of any class.
        count: tokens of the output.
        delta: whether the caller takes the logprobs of these tokens, from the end.
    """
    if delta and isinstance(processor, DeferredLogprobs):
        return processor.newest(count)
    return processor.logprobs


def _is_upstreams(processor: upstream.LogprobsProcessor) -> bool:
    """Whether nobody has replaced the processor's class, or what it calls."""
    return (
        type(processor) is upstream.LogprobsProcessor
        and subclasses.all_vllms(processor, _METHODS)
        and all(
            str(getattr(function, "__module__", "")).startswith("vllm.")
            and not hasattr(function, "__wrapped__")
            for function in map(vars(upstream).get, _FUNCTIONS)
        )
    )


class _Collector:
    """Pauses the garbage collector of the process, for all threads that ask.

    By its threshold, so that whoever disables or enables it in a pause is obeyed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._thresholds: tuple[int, int, int] = (0, 0, 0)

    @contextmanager
    def paused(self, objects: int) -> Iterator[None]:
        """Keep the collector from walking objects while many are made, none of them garbage.

        Where all requests of a batch end in one step, it would take three quarters of that step.

        Args:
            objects: number of objects that the caller makes; for few there is no pause.
        """
        if objects < _MANY:
            yield
            return
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
                # Unless another thread has set one of its own since.
                if not self._pauses and gc.get_threshold()[0] == _NEVER:
                    gc.set_threshold(*self._thresholds)


_collector = _Collector()


def _limit(number: int | None) -> int | None:
    """Logprobs of a position that a request is shown, the sampled token's included."""
    return None if number is None or number < 0 else 1 + number


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether numpy can look into a tensor."""
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in _DTYPES


def _in_order(ids: object, logprobs: object, ranks: object) -> bool:
    """Whether these are arrays as the engine makes them, of as many positions each."""
    return (
        type(ids) is type(logprobs) is type(ranks) is np.ndarray
        and ids.ndim == 2
        and ids.shape == logprobs.shape
        and ids.shape[:1] == ranks.shape
        and ids.shape[1] > 0
    )
