"""JSON of the logprobs in a streamed chunk, for the feature ``streamed-chunks``.

Stock 0.22.0 makes and validates a pydantic object for each of a token's top logprobs, and encodes
each of its bytes as a number, in every chunk. Here the constant part of a token's text is encoded
once, and the floats of a chunk at once. Both are written by pydantic's own serializer.
"""

# mirrors: vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_logprobs
# mirrors: vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._get_top_logprobs
# mirrors: vllm.entrypoints.openai.engine.serving:OpenAIServing._get_decoded_token
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProb
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProbsContent
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProbs
# mirrors: vllm.entrypoints.openai.completion.protocol:CompletionLogProbs

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from vllm.logprobs import Logprob

if TYPE_CHECKING:
    from vllm.logprobs import LogprobsOnePosition
    from vllm.tokenizers import TokenizerLike

#: The least logprob that a client gets.
_LEAST = -9999.0
#: Texts of tokens to keep: more than half of a large vocabulary, some 20 MB.
_TEXTS = 1 << 16


class UnusualValueError(Exception):
    """A value is of an unexpected type. Upstream is to convert it, or to fail at it."""


def chat(
    token_ids: Sequence[int],
    top_logprobs: "Sequence[LogprobsOnePosition | None]",
    tokenizer: "TokenizerLike | None",
    number: int,
    as_ids: bool,
) -> str:
    """Return the JSON of a chat chunk's logprobs.

    Args:
        token_ids: the chunk's tokens.
        top_logprobs: logprobs of each token, with those of the top tokens.
        tokenizer: decodes tokens whose logprob has no text.
        number: top logprobs to show per token; -1 for all.
        as_ids: show tokens by their ids.

    Raises:
        UnusualValueError: a value is of an unexpected type.
        Exception: whatever upstream raises for these values, or another error.
    """
    rows: list[tuple[str, str, list[tuple[str, str]]] | str] = []
    values: list[float] = []
    for position, token_id in enumerate(token_ids):
        logprobs = top_logprobs[position]
        own = None if logprobs is None else logprobs.get(token_id)
        if own is None or logprobs is None:
            text = _text(None, token_id, tokenizer, as_ids)
            rows.append(f'{{"token":{encoded(text)},"bytes":{_bytes(text)}}}')
            continue
        text = _text(own, token_id, tokenizer, as_ids)
        begin, end = _entry(text)
        if own.decoded_token != text:
            end = _end(own.decoded_token)
        shown = logprobs if number == -1 else islice(logprobs, max(0, number))
        tops = [(top_id, logprobs[top_id]) for top_id in shown]
        entries = [_entry(_text(top, top_id, tokenizer, as_ids)) for top_id, top in tops]
        rows.append((begin, end, entries))
        values.append(own.logprob)
        values += [top.logprob for _, top in tops]
    numbers = iter(_numbers(values))
    return f'{{"content":[{",".join([_row(row, numbers) for row in rows])}]}}'


def completion(
    token_ids: Sequence[int],
    top_logprobs: "Sequence[LogprobsOnePosition | None]",
    tokenizer: "TokenizerLike | None",
    number: int,
    as_ids: bool,
    offset: int,
) -> str:
    """Return the JSON of a completion chunk's logprobs, as :func:`chat` does for chat.

    ``number`` top logprobs are shown besides a token's own. ``offset`` is that of the chunk's first
    token in the text, in characters.
    """
    offsets: list[int] = []
    texts: list[str] = []
    own: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    values: list[float] = []
    for position, token_id in enumerate(token_ids):
        logprobs = top_logprobs[position]
        if logprobs is None:
            text = _text(None, token_id, tokenizer, as_ids)
            own.append(None)
            tops.append(None)
        else:
            text = _text(logprobs[token_id], token_id, tokenizer, as_ids)
            value = _clamped(logprobs[token_id].logprob)
            shown = list(logprobs.items())[: max(0, number + 1)]
            top = {_text(top, id_, tokenizer, as_ids): _clamped(top.logprob) for id_, top in shown}
            own.append(value)
            tops.append(top)
            values += value, *top.values()
        offsets.append(offset)
        texts.append(text)
        offset += len(text)
    _check(values)
    fields = {
        "text_offset": offsets,
        "token_logprobs": own,
        "tokens": texts,
        "top_logprobs": tops,
    }
    json: bytes = to_json(fields, inf_nan_mode="null")
    return json.decode()


def _text(
    logprob: Logprob | None, token_id: int, tokenizer: "TokenizerLike | None", as_ids: bool
) -> str:
    """Return the text that a client gets for a token."""
    if as_ids:
        return f"token_id:{token_id}"
    text: Any = None if logprob is None else logprob.decoded_token
    if text is None:
        if tokenizer is None:
            raise UnusualValueError
        text = tokenizer.decode(token_id if logprob is None else [token_id])
    if type(text) is not str:
        raise UnusualValueError
    return text


def _clamped(logprob: Any) -> Any:  # noqa: ANN401
    # A comparison that keeps NaN, as upstream's max does.
    return _LEAST if logprob < _LEAST else logprob


def _check(values: Sequence[float]) -> None:
    """Raise unless all are floats; pydantic would convert others."""
    if values and {*map(type, values)} != {float}:
        raise UnusualValueError


def _numbers(values: list[float]) -> list[str]:
    """Return the JSON of each value, clamped."""
    if not values:
        return []
    _check(values)
    clamped = [_LEAST if value < _LEAST else value for value in values]
    json: bytes = to_json(clamped, inf_nan_mode="null")
    return json[1:-1].decode().split(",")


def _row(row: tuple[str, str, list[tuple[str, str]]] | str, numbers: Iterator[str]) -> str:
    """Return the JSON of a token, with the next numbers."""
    if isinstance(row, str):
        return row
    begin, end, entries = row
    own = next(numbers)
    tops = ",".join([f"{before}{next(numbers)}{after}}}" for before, after in entries])
    return f'{begin}{own}{end},"top_logprobs":[{tops}]}}'


def encoded(value: object) -> str:
    """Return a value's JSON, by pydantic's serializer."""
    json: bytes = to_json(value)
    return json.decode()


def _bytes(text: str) -> str:
    return f"[{','.join(map(str, text.encode()))}]"


@lru_cache(_TEXTS)
def _entry(text: str) -> tuple[str, str]:
    """Return what precedes and what follows the logprob of a token with this text."""
    return f'{{"token":{encoded(text)},"logprob":', f',"bytes":{_bytes(text)}'


def _end(decoded: str | None) -> str:
    return ',"bytes":null' if decoded is None else _entry(decoded)[1]
