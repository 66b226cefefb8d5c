"""Types of a request's fields, for the fix ``bad-requests``.

No front end of 0.22.0 checks them. A message takes most values: an engine core in a process of its
own then decodes it by the declared types, in the thread that reads all requests, and a value of
another type ends that thread. A message does not take numpy's numbers: the request fails after its
front end has counted it, and waits for it from then on.

Here a number of a library's type becomes Python's own (:func:`convert`), and a request that the
engine core cannot decode is refused before it is counted (:func:`check`).

An engine core in the front end's own process reads no messages, and serves most values of other
types. What it serves is left to it.
"""

# mirrors: vllm.v1.serial_utils:MsgpackEncoder.enc_hook
# mirrors: vllm.v1.serial_utils:MsgpackDecoder.dec_hook

import operator
import reprlib
import threading
from copy import copy
from enum import Enum
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin
from weakref import WeakSet

import msgspec
import numpy as np
import torch
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

#: Types that :func:`convert` knows; None is allowed beside each.
_NUMBERS = (int, float, bool, list[int], list[list[int]], list[bool], set[int], dict[int, float])
#: Containers that a list of numbers may be made of. A dict or a text is none.
_CONTAINERS = (list, tuple, set, frozenset, range, np.ndarray, torch.Tensor)
#: Fields of a request that vLLM makes, or that are long: they have no part in a trial.
_LEFT_OUT = ("prompt_token_ids", "mm_features", "prompt_embeds", "prompt_is_token_ids")
#: Stands in a trial for a value that upstream's encoder has a form of its own for.
_OPAQUE = msgspec.msgpack.Ext(0, b"")

_in_process: "WeakSet[EngineCore]" = WeakSet()
_lock = threading.Lock()


def serve_in_process(core: "EngineCore") -> None:
    """Note that an engine core serves the front end of its own process, without messages."""
    with _lock:
        _in_process.add(core)


def is_in_process(config: "VllmConfig") -> bool:
    """Whether the engine core of a front end's config reads no messages."""
    with _lock:
        return any(core.vllm_config is config for core in _in_process)


def convert(struct: msgspec.Struct) -> None:
    """Replace numbers of other libraries by Python's that are equal.

    Integers are those that Python takes as an index, so that 16.0 is none. Lists of integers may
    be any container of them.

    Args:
        struct: the request's own; its fields are replaced, not the values.
    """
    for name, kind in _numbers(type(struct)):
        value = getattr(struct, name)
        if value is not None and type(value) is not kind:
            equal = _converted(value, kind)
            if equal is not value:
                setattr(struct, name, equal)


def check(request: EngineCoreRequest) -> None:
    """Refuse a request that an engine core in a process of its own cannot decode.

    Raises:
        VLLMValidationError: it cannot; the error names the field.
    """
    try:
        msgspec.convert(request.prompt_token_ids, list[int] | None)
    except msgspec.ValidationError as error:
        refuse("prompt_token_ids", request.prompt_token_ids, list[int], str(error))
    trial = copy(request)
    for name in _LEFT_OUT:
        setattr(trial, name, None)
    if _failure(trial, EngineCoreRequest) is not None:
        _refuse_field_of(trial)


def is_integer(value: object) -> bool:
    """Whether a value, once converted, is an integer. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(parameter: str, value: object, kind: object, why: str | None = None) -> NoReturn:
    """Refuse a value of a wrong type.

    Args:
        parameter: name of the field.
        value: what a client gave.
        kind: the declared type.
        why: the decoder's words; None for the type's name.
    """
    expected = kind.__name__ if type(kind) is type else kind
    raise VLLMValidationError(
        f"{parameter}: the engine cannot read {reprlib.repr(value)} "
        f"({why or type(value).__name__}). Pass a value of type {expected}.",
        parameter=parameter,
        value=value,
    )


@cache
def _numbers(struct: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a struct that hold numbers, and the type of each without None."""
    plain = ((field.name, _without_none(field.type)) for field in msgspec.structs.fields(struct))
    return tuple((name, kind) for name, kind in plain if kind in _NUMBERS)


def _without_none(kind: Any) -> Any:  # noqa: ANN401
    rest = [each for each in get_args(kind) if each is not NoneType]
    return rest[0] if NoneType in get_args(kind) and len(rest) == 1 else kind


def _converted(value: Any, kind: Any) -> Any:  # noqa: ANN401
    """Return an equal value of the declared type; the value itself if there is none."""
    if (scalar := _SCALARS.get(kind)) is not None:
        return scalar(value)
    first, *others = get_args(kind)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            return value
        pairs = value.items()
        return {_converted(key, first): _converted(each, others[0]) for key, each in pairs}
    if not isinstance(value, _CONTAINERS) or getattr(value, "ndim", 1) == 0:
        return value
    try:  # much faster than one by one, and a prompt is long
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        made = set if get_origin(kind) is set else list
        return made(_converted(each, first) for each in value)


def _integer(value: Any) -> Any:  # noqa: ANN401
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        # A message carries the value of an enum's member.
        return int(operator.index(value.value if isinstance(value, Enum) else value))
    except TypeError:
        return value


def _float(value: Any) -> Any:  # noqa: ANN401
    """Convert a number; ints are left, since the engine core reads them as floats."""
    if isinstance(value, (bool, np.bool_)) or type(value) in (int, float):
        return value
    if not hasattr(value, "__float__") or getattr(value, "ndim", 0) > 0:
        return value
    return float(value)


def _bool(value: Any) -> Any:  # noqa: ANN401
    return bool(value) if isinstance(value, np.bool_) else value


_SCALARS: "Mapping[type, Callable[[Any], Any]]" = {int: _integer, float: _float, bool: _bool}


def _encode(value: object) -> object:
    """Stand in for upstream's encoder, whose tensors would be sent."""
    if (
        isinstance(value, (torch.Tensor, np.ndarray, slice))
        or envs.VLLM_ALLOW_INSECURE_SERIALIZATION
    ):
        return _OPAQUE
    raise TypeError(f"no message takes a {type(value).__name__}")


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":  # noqa: ANN401
    return msgspec.msgpack.Decoder(
        kind, ext_hook=lambda *_: _OPAQUE, dec_hook=lambda _, value: value
    )


def _failure(value: object, kind: Any) -> str | None:  # noqa: ANN401
    """Return why a value does not arrive as its declared type; None if it does."""
    try:
        _decoder(kind).decode(msgspec.msgpack.encode(value, enc_hook=_encode))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None


def _refuse_field_of(struct: msgspec.Struct) -> None:
    """Refuse the first field, here or in a struct here, that does not arrive."""
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        failure = _failure(value, field.type)
        if failure is not None:
            if isinstance(value, msgspec.Struct):
                _refuse_field_of(value)
            refuse(field.name, value, field.type, failure)
