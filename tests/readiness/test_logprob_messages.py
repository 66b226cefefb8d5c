"""The feature logprobs, in messages: they have upstream's bytes, and are read alike."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.logprobs import Side, Step, Wish
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import logprob_messages
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

shapes = st.sampled_from([(1, 1), (1, 21), (2, 3), (0, 5), (3, 40)])
dtypes = st.sampled_from(["<i4", "<f4", "<i8", "<f8", "<f2", ">f4", "<i4"])


@st.composite
def lists(draw: st.DrawFn) -> LogprobsLists:
    def array(shape: tuple[int, ...]) -> np.ndarray:
        made = np.arange(2 * np.prod(shape, dtype=int)).astype(draw(dtypes))
        return (
            made[::2].reshape(shape)
            if draw(st.booleans())
            else made[: made.size // 2].reshape(shape)
        )

    shape = draw(shapes)
    counts = draw(st.sampled_from([None, None, None, [0, 1]]))
    return LogprobsLists(array(shape), array(shape), array(shape[:1]), counts)


def arrays(outputs: EngineCoreOutputs) -> Iterator[Any]:
    """What can be seen of each array."""
    for output in outputs.outputs:
        for array in (output.new_logprobs or ())[:3]:
            yield type(array), array.dtype.str, array.shape, array.tobytes(), array.flags.writeable


@given(st.lists(lists() | st.none(), max_size=4))
def test_a_message_has_upstreams_bytes(drawn: list[LogprobsLists | None]) -> None:
    outputs = EngineCoreOutputs(
        outputs=[EngineCoreOutput(str(n), [n], new_logprobs=one) for n, one in enumerate(drawn)],
        timestamp=1.0,
    )
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    expected = [bytes(part) for part in encoder.encode(outputs)]
    packed = logprob_messages.packed(outputs, encoder)
    message = encoder.encode(packed)
    assert [bytes(part) for part in message] == expected
    assert all(out.new_logprobs is one for out, one in zip(outputs.outputs, drawn, strict=True))
    stock = decoder.decode(message)
    before = decoder.decoder
    logprob_messages.quicken(decoder)
    assert decoder.decoder is not before
    ours = decoder.decode(message)
    assert list(arrays(ours)) == list(arrays(stock))
    assert [o.new_logprobs and o.new_logprobs[3] for o in ours.outputs] == [
        o.new_logprobs and o.new_logprobs[3] for o in stock.outputs
    ]


class TheirDecoder(MsgpackDecoder):  # type: ignore[misc]
    """Somebody's own decoder."""


class TheirEncoder(MsgpackEncoder):  # type: ignore[misc]
    """Somebody's own encoder."""


def test_their_messages_are_left_alone() -> None:
    decoder = TheirDecoder(EngineCoreOutputs)
    before = decoder.decoder
    logprob_messages.quicken(decoder)
    assert decoder.decoder is before
    outputs = Side(True, [Wish(3)], True).outputs(0, Step([1], 4, 0))
    assert logprob_messages.packed(outputs, TheirEncoder()) is outputs
    assert logprob_messages.packed(outputs, MsgpackEncoder()) is not outputs


@pytest.mark.parametrize("value", ["off", "-logprobs"])
def test_off_means_upstream(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(switch.NAME, value)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    before = decoder.decoder
    logprob_messages.quicken(decoder)
    assert decoder.decoder is before
    outputs = Side(True, [Wish(3)], True).outputs(0, Step([1], 4, 0))
    assert logprob_messages.packed(outputs, MsgpackEncoder()) is outputs
