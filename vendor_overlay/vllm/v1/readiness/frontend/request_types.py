"""Conversions and type checks of a request's fields, for the fix ``bad-requests``.

Stock 0.22.0's front ends do not check the types of these fields. Most values can be encoded, but
the engine core's input thread decodes them as the declared types, and dies if a type differs. A
NumPy number cannot be encoded: the request fails after the front end has registered it, and stays
registered.

Here numbers of other libraries are converted to Python numbers (:func:`convert`). A request that
the engine core cannot decode is refused before it is registered (:func:`check`), unless the engine
core runs in the front end's process and decodes no messages.
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

#: Field types that :func:`convert` supports, optional or not.
_NUMBERS = (int, float, bool, list[int], list[list[int]], list[bool], set[int], dict[int, float])
#: Containers that are converted to a list or set of numbers.
_CONTAINERS = (list, tuple, set, frozenset, range, np.ndarray, torch.Tensor)
#: Fields that are not encoded in :func:`check`, because vLLM creates them or they are long.
_LEFT_OUT = ("prompt_token_ids", "mm_features", "prompt_embeds", "prompt_is_token_ids")
#: Stands for a value that upstream's hook encodes.
_OPAQUE = msgspec.msgpack.Ext(0, b"")

_in_process: "WeakSet[EngineCore]" = WeakSet()
_lock = threading.Lock()


def serve_in_process(core: "EngineCore") -> None:
    """Register an engine core that runs in its front end's process."""
    with _lock:
        _in_process.add(core)


def is_in_process(config: "VllmConfig") -> bool:
    """Return whether the engine core with this config runs in this process."""
    with _lock:
        return any(core.vllm_config is config for core in _in_process)


def convert(struct: msgspec.Struct) -> None:
    """Replace numbers of other libraries in the fields of ``struct`` by equal Python numbers.

    Only values with ``__index__`` are converted to integers, so 16.0 is not. Any container of
    numbers is converted for a list or set field. Old values are not changed in place.
    """
    for name, kind in _numbers(type(struct)):
        value = getattr(struct, name)
        if value is not None and type(value) is not kind:
            equal = _converted(value, kind)
            if equal is not value:
                setattr(struct, name, equal)


def check(request: EngineCoreRequest) -> None:
    """Raise VLLMValidationError if an engine core in another process cannot decode a field."""
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
    """Return whether a converted value is an integer other than a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(parameter: str, value: object, kind: object, why: str | None = None) -> NoReturn:
    """Raise VLLMValidationError for a value whose type is not ``kind``, for the reason ``why``."""
    expected = kind.__name__ if type(kind) is type else kind
    raise VLLMValidationError(
        f"{parameter}: the engine cannot read {reprlib.repr(value)} "
        f"({why or type(value).__name__}). Pass a value of type {expected}.",
        parameter=parameter,
        value=value,
    )


@cache
def _numbers(struct: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Return the name and non-optional type of each field that :func:`convert` supports."""
    plain = ((field.name, _without_none(field.type)) for field in msgspec.structs.fields(struct))
    return tuple((name, kind) for name, kind in plain if kind in _NUMBERS)


def _without_none(kind: Any) -> Any:  # noqa: ANN401
    rest = [item for item in get_args(kind) if item is not NoneType]
    return rest[0] if NoneType in get_args(kind) and len(rest) == 1 else kind


def _converted(value: Any, kind: Any) -> Any:  # noqa: ANN401
    """Convert a value to its declared type; return it unchanged if no equal value exists."""
    if (scalar := _SCALARS.get(kind)) is not None:
        return scalar(value)
    first, *others = get_args(kind)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            return value
        pairs = value.items()
        return {_converted(key, first): _converted(item, others[0]) for key, item in pairs}
    if not isinstance(value, _CONTAINERS) or getattr(value, "ndim", 1) == 0:
        return value
    try:  # fast path for long prompts
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        container = set if get_origin(kind) is set else list
        return container(_converted(item, first) for item in value)


def _integer(value: Any) -> Any:  # noqa: ANN401
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        # An enum member is encoded as its value.
        return int(operator.index(value.value if isinstance(value, Enum) else value))
    except TypeError:
        return value


def _float(value: Any) -> Any:  # noqa: ANN401
    """Convert a number to float, except an int, which also decodes as a float."""
    if isinstance(value, (bool, np.bool_)) or type(value) in (int, float):
        return value
    if not hasattr(value, "__float__") or getattr(value, "ndim", 0) > 0:
        return value
    return float(value)


_SCALARS: "Mapping[type, Callable[[Any], Any]]" = {
    int: _integer,
    float: _float,
    bool: lambda value: bool(value) if isinstance(value, np.bool_) else value,
}


def _encode(value: object) -> object:
    """Accept the values that upstream's encoder hook accepts, without copying them."""
    if (
        isinstance(value, (torch.Tensor, np.ndarray, slice))
        or envs.VLLM_ALLOW_INSECURE_SERIALIZATION
    ):
        return _OPAQUE
    raise TypeError(f"cannot encode a {type(value).__name__}")


@cache
def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":  # noqa: ANN401
    return msgspec.msgpack.Decoder(
        kind, ext_hook=lambda *_: _OPAQUE, dec_hook=lambda _, value: value
    )


def _failure(value: object, kind: Any) -> str | None:  # noqa: ANN401
    """Return the error of encoding and decoding a value as its declared type, or None."""
    try:
        _decoder(kind).decode(msgspec.msgpack.encode(value, enc_hook=_encode))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None


def _refuse_field_of(struct: msgspec.Struct) -> None:
    """Refuse the first field, nested structs included, that cannot be decoded."""
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        failure = _failure(value, field.type)
        if failure is not None:
            if isinstance(value, msgspec.Struct):
                _refuse_field_of(value)
            refuse(field.name, value, field.type, failure)
