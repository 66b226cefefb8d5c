"""The fix bad-requests in the engine core: requests as the Rust front end writes them.

The thread of a real engine core that reads requests gets them from a socket.
"""

import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support import modules, scheduling
from support.clients import BEYOND_BOUNDS
from support.scheduling import VOCABULARY
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.readiness.frontend import request_types
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

FIX = "bad-requests"
CORE = "vllm/v1/engine/core.py"
PROMPT = [3, 4, 5, 6]
LENGTH = 24
CLIENT = 3
#: Parameters that the Rust front end writes in each request.
PARAMS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "max_tokens": 4,
    "min_tokens": 0,
    "stop_token_ids": [],
    "_all_stop_token_ids": [2],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def message(name: str, prompt: Sequence[int] = PROMPT, **params: Any) -> bytes:
    """A request's bytes; it has no field behind ``external_req_id``."""
    fields = [name, prompt, None, PARAMS | params, None, 0.0, *[None] * 5]
    fields += [CLIENT, 0, 0, None, False, name]
    return msgspec.msgpack.encode(fields)


@pytest.fixture
def config() -> Any:
    config = scheduling.make_scheduler(False, None, 16, 4, 64, LENGTH).vllm_config
    config.structured_outputs_config = StructuredOutputsConfig()
    return config


class Arrived:
    """Results of the thread that reads requests.

    Attributes:
        requests: those that it passed on, by id.
        refused: the ids of those that it answered with an error, with their clients.
        error: the one that ended the thread.
    """

    def __init__(self, side: str, config: Any, address: str) -> None:
        self.core = core = object.__new__(modules.of_side(side)(CORE).EngineCoreProc)
        core.vllm_config, core.input_queue, core.aborts_queue = config, queue.Queue(), queue.Queue()
        core.tensor_ipc_receiver = core.mm_receiver_cache = core.request_block_hasher = None
        core.frontend_stats_publish_address = None
        self.grammars: list[Request] = []
        core.structured_output_manager = SimpleNamespace(
            tokenizer=SimpleNamespace(max_token_id=VOCABULARY - 1), grammar_init=self._compile
        )
        self.refused: list[tuple[str, int]] = []
        core._send_error_outputs_to_client = self._refuse
        self.error: Exception | None = None
        self._address = address

    def _compile(self, request: Request) -> None:
        params = request.sampling_params.structured_outputs
        if params._backend is None:
            raise ValueError("Unsupported structured output backend: None")
        self.grammars.append(request)

    def _refuse(self, names: list[str], client: int) -> None:
        self.refused += [(name, client) for name in names]

    def run(self) -> None:
        """Read requests until one ends the thread."""
        try:
            self.core.process_input_sockets([self._address], None, b"\0\0", threading.Event())
        except Exception as error:
            self.error = error

    @property
    def requests(self) -> dict[str, Request]:
        items = [self.core.input_queue.get() for _ in range(self.core.input_queue.qsize())]
        return {request.request_id: request for _, (request, _) in items}


def send(side: str, config: Any, folder: Any, *messages: bytes) -> Arrived:
    """Send requests to an engine core, and what no engine core reads after them."""
    address = f"ipc://{folder}/core"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as line:
        line.bind(address)
        arrived = Arrived(side, config, address)
        thread = threading.Thread(target=arrived.run)
        thread.start()
        identity, _ = line.recv_multipart()
        for sent in messages:
            line.send_multipart([identity, EngineCoreRequestType.ADD.value, sent])
        line.send_multipart([identity, b"end", b""])
        thread.join()
    return arrived


#: Parameters whose decoding fails, and others that fail a step.
UNREADABLE: list[dict[str, Any]] = [
    *({"min_tokens": 5}, {"temperature": -1.0}, {"top_p": 2.0}, {"min_p": 2.0}),
    *({"presence_penalty": 9.0}, {"repetition_penalty": 0.0}, {"logprobs": -5}, {"seed": "x"}),
]
FAILING: list[dict[str, Any]] = [
    {"prompt": [VOCABULARY]},
    {"allowed_token_ids": [VOCABULARY]},
    {"logit_bias": {VOCABULARY: 1.0}},
    {"logprobs": VOCABULARY + 1},
    {"prompt_logprobs": VOCABULARY + 1},
    {"seed": 1 << 63, "temperature": 1.0, "mrv2": True},
]


@pytest.mark.parametrize("params", UNREADABLE, ids=str)
def test_a_request_that_cannot_be_read_ends_alone(
    side: str, config: Any, tmp_path: Any, params: dict[str, Any]
) -> None:
    arrived = send(side, config, tmp_path, message("bad", **params), message("good"))
    if side == "ours":
        assert arrived.refused == [("bad", CLIENT)]
        assert arrived.requests.keys() == {"good"}
        assert "is not a valid EngineCoreRequestType" in str(arrived.error)
    else:
        assert isinstance(arrived.error, msgspec.ValidationError)
        assert "$[3]" in str(arrived.error)  # the parameters
        assert not arrived.requests


@pytest.mark.parametrize("params", FAILING, ids=str)
def test_a_request_that_fails_a_step_ends_alone(
    side: str,
    config: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
) -> None:
    params = {**params}
    mrv2 = params.pop("mrv2", False)
    monkeypatch.setattr(type(config), "use_v2_model_runner", property(lambda _: mrv2))
    arrived = send(side, config, tmp_path, message("bad", **params), message("good"))
    refused = [("bad", CLIENT)] if side == "ours" else []
    assert arrived.refused == refused
    assert arrived.requests.keys() == {"bad", "good"} - {name for name, _ in refused}


@pytest.mark.parametrize(
    "structured",
    [
        {"json": SCHEMA},
        {"regex": "[ab]+"},
        {"choice": ["a", "b"]},
        {"json": {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}},
        {"grammar": 'root ::= "a"'},
    ],
    ids=str,
)
def test_a_grammars_backend_is_the_one_that_the_front_end_chooses(
    side: str, config: Any, tmp_path: Any, structured: dict[str, Any]
) -> None:
    arrived = send(side, config, tmp_path, message("r", structured_outputs=structured))
    if side != "ours":
        assert arrived.refused == [("r", CLIENT)]
        return
    expected = SamplingParams(structured_outputs=StructuredOutputsParams(**structured))
    tokenizer = arrived.core.structured_output_manager.tokenizer
    expected._validate_structured_outputs(config.structured_outputs_config, tokenizer)
    (request,) = arrived.requests.values()
    assert [request] == arrived.grammars
    assert request.sampling_params.structured_outputs == expected.structured_outputs


@pytest.mark.parametrize(
    "structured", [*(grammar for grammar, _ in BEYOND_BOUNDS), {"regex": "(a|"}, {"choice": []}]
)
def test_a_bad_grammar_is_refused(config: Any, tmp_path: Any, structured: dict[str, Any]) -> None:
    arrived = send("ours", config, tmp_path, message("r", structured_outputs=structured))
    assert arrived.refused == [("r", CLIENT)]
    assert not arrived.grammars


def test_what_the_front_end_has_checked_is_left_as_it_is(config: Any, tmp_path: Any) -> None:
    """A grammar's text is not validated again: this one would be refused."""
    structured = {"regex": "(a|", "_backend": "xgrammar"}
    sent = message("r", structured_outputs=structured, min_tokens=2, logprobs=3, seed=5)
    requests = [
        next(iter(send(side, config, tmp_path / side, sent).requests.values()))
        for side in ("pinned", "ours")
        if (tmp_path / side).mkdir() is None
    ]
    assert requests[0].sampling_params == requests[1].sampling_params


def test_token_ids_of_a_larger_tokenizer_and_of_images_are_served(
    config: Any, tmp_path: Any
) -> None:
    core = Arrived("ours", config, "").core
    core.structured_output_manager.tokenizer.max_token_id = VOCABULARY + 9
    decoder = MsgpackDecoder(EngineCoreRequest)
    request = decoder.decode(message("r", [VOCABULARY + 9]))
    assert core.preprocess_add_request(request)[0].prompt_token_ids == [VOCABULARY + 9]


def test_an_engine_core_in_the_same_process_checks_nothing(config: Any) -> None:
    """Its front end does, and serves values of other types."""
    core = Arrived("ours", config, "").core
    request = MsgpackDecoder(EngineCoreRequest).decode(message("r", [VOCABULARY]))
    with pytest.raises(ValueError, match="out of range"):
        core.preprocess_add_request(request)
    request_types.serve_in_process(core)
    assert core.preprocess_add_request(request)
