"""The fix grammar-limits: a grammar is tried in a process of its own, under limits.

The trials are real: vLLM's backends, its front end's input processor, and the program that the
front end starts. Upstream's validation is the oracle of what a grammar becomes that fits.
"""

import asyncio
import copy
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from demo import model
from support import modules
from support.checkpoint import VOCABULARY
from support.sites import REPO
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import grammar_limits, grammar_trials

INPUT_PROCESSOR = "vllm/v1/engine/input_processor.py"
#: Makes our modules importable in the program, as tests/conftest.py does in this process.
_OURS = f"import vllm.v1; vllm.v1.__path__.append('{REPO}/vendor_overlay/vllm/v1'); "

FITTING: dict[str, dict[str, Any]] = {
    "a regex": {"regex": "(t[0-9]+)+"},
    "a choice": {"choice": ["t1t2", "t3"]},
    "a schema": {"json": {"type": "object", "properties": {"t": {"type": "integer"}}}},
    "a grammar": {"grammar": 'root ::= "t1" root | "t2"'},
    "a Lark grammar": {"grammar": "start: 't1' start | 't2'"},
    "any object": {"json_object": True},
    "left to guidance": {"json": {"type": "integer", "multipleOf": 5}},
}
INVALID: dict[str, dict[str, Any]] = {
    "a regex": {"regex": "(t1|"},
    "a schema": {"json": "{"},
    "a grammar": {"grammar": "root ::= nothing"},
    "no choice": {"choice": []},
}


def chain(rule: str, number: int) -> str:
    """A grammar of rules, each of which refers to the next."""
    rules = [rule.format(this=n, next=n + 1) for n in range(number)]
    return "\n".join(["root ::= r0", *rules, f'r{number} ::= "t1"'])


def nested(depth: int) -> str:
    """A schema of objects in one another."""
    return '{"type":"object","properties":{"t":' * depth + "{}" + "}}" * depth


#: Limit to a grammar that exceeds it, with seconds and MiB, and a part of the error.
EXCEEDING: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "seconds": (
        {"json": nested(450)},
        1,
        1024,
        f"more than 1 s of CPU time to compile and try.*{switch.GRAMMAR_SECONDS}",
    ),
    "seconds of a mask": (
        {"regex": "((([a-z0-9]{1,100}){1,100}){1,100}){1,100}"},
        2,
        1024,
        f"0.02 s of CPU time per token.*{switch.GRAMMAR_SECONDS}",
    ),
    "seconds of a token": (
        {"grammar": chain("r{this} ::= [a-z0-9]+ r{next} | [t0-9]+ r{next}", 3000)},
        1,
        1024,
        f"0.01 s of CPU time per token.*{switch.GRAMMAR_SECONDS}",
    ),
    "memory": (
        {"grammar": chain('r{this} ::= r{next} "t1"', 20000)},
        60,
        512,
        f"more than 512 MiB of memory to compile and try.*{switch.GRAMMAR_MEMORY}",
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """The configuration of an engine with a tokenizer of words such as "t17"."""
    folder = tmp_path_factory.mktemp("model")
    words = model.write_tokenizer(folder / "words", VOCABULARY)
    served = model.write(folder / "served", vocab_size=VOCABULARY)
    return EngineArgs(
        model=str(served), tokenizer=str(words), load_format="dummy", enforce_eager=True
    ).create_engine_config()


@pytest.fixture(scope="module")
def processors(config: VllmConfig) -> Iterator[dict[str, Any]]:
    """The front ends of upstream and of the overlay; the latter keeps its program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_limits, "_PROGRAM", _OURS + grammar_limits._PROGRAM)
        sides = {"pinned": modules.pristine, "ours": modules.overlaid}
        made = {side: load(INPUT_PROCESSOR).InputProcessor(config) for side, load in sides.items()}
        yield made
        if trials := vars(made["ours"]).get(grammar_limits._TRIALS):
            trials._program._process.kill()


def validated(processor: Any, grammar: dict[str, Any]) -> StructuredOutputsParams:
    """The structured outputs of a request as a front end sends them to the engine."""
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(**grammar))
    prompt = {"type": "token", "prompt_token_ids": [3, 4]}
    request = processor.process_inputs("r", prompt, params, ("generate",))
    assert params.structured_outputs == request.sampling_params.structured_outputs
    structured: StructuredOutputsParams = request.sampling_params.structured_outputs
    return structured


@pytest.mark.parametrize("grammar", FITTING.values(), ids=FITTING)
def test_a_grammar_that_fits_becomes_what_upstream_makes_of_it(
    processors: dict[str, Any], grammar: dict[str, Any]
) -> None:
    expected = validated(processors["pinned"], grammar)
    assert expected._backend is not None
    for _ in range(2):  # the second verdict is kept
        assert vars(validated(processors["ours"], grammar)) == vars(expected)


@pytest.mark.parametrize("grammar", INVALID.values(), ids=INVALID)
def test_a_grammar_that_is_not_valid_is_refused_as_upstream_does(
    processors: dict[str, Any], grammar: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as expected:
        validated(processors["pinned"], grammar)
    with pytest.raises(ValueError) as ours:
        validated(processors["ours"], grammar)
    assert type(ours.value) is type(expected.value)
    assert without_times(ours.value) == without_times(expected.value)


def without_times(error: Exception) -> str:
    """The text of an error without the time of day that xgrammar puts into it."""
    return "]".join(str(error).split("]")[1:]) or str(error)


@pytest.mark.parametrize(
    ("grammar", "seconds", "memory", "text"), EXCEEDING.values(), ids=EXCEEDING
)
def test_a_grammar_that_exceeds_a_limit_is_refused_by_its_name(
    processors: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    grammar: dict[str, Any],
    seconds: int,
    memory: int,
    text: str,
) -> None:
    monkeypatch.setenv(switch.GRAMMAR_SECONDS, str(seconds))
    monkeypatch.setenv(switch.GRAMMAR_MEMORY, str(memory))
    with pytest.raises(VLLMValidationError, match=text):
        validated(processors["ours"], grammar)
    validated(processors["ours"], {"regex": f"t1|{len(text)}"})


def test_the_event_loop_goes_on_meanwhile(
    processors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.GRAMMAR_SECONDS, "2")
    hostile = SamplingParams(structured_outputs=StructuredOutputsParams(json=nested(449)))
    honest = SamplingParams(structured_outputs=StructuredOutputsParams(regex="t1|t449"))
    before = copy.copy(honest.structured_outputs)
    processor = processors["ours"]

    async def serve() -> tuple[bool, int]:
        trial = asyncio.ensure_future(grammar_limits.prepare(processor, hostile))
        await grammar_limits.prepare(processor, honest)
        beside, turns = not trial.done(), 0
        while not trial.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(VLLMValidationError):
            await trial
        return beside, turns

    beside, turns = asyncio.run(serve())
    assert beside
    assert turns > 20
    assert honest.structured_outputs == before  # prepare changes nothing


def children(processor: Any) -> list[Any]:
    """The trials that run, once one does."""
    program = vars(processor)[grammar_limits._TRIALS]._program._process.pid
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        found: list[Any] = psutil.Process(program).children()
        if found:
            return found
        time.sleep(0.01)


def test_a_compiler_that_ends_by_a_signal_ends_its_request_alone(
    processors: dict[str, Any],
) -> None:
    validated(processors["ours"], FITTING["a regex"])
    trials = vars(processors["ours"])[grammar_limits._TRIALS]
    verdict = trials.verdict(StructuredOutputsParams(json=nested(448)))
    # The program may have another child, which is found before it has forked the trial.
    while not verdict.done():
        for child in psutil.Process(trials._program._process.pid).children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGSEGV)
        time.sleep(0.01)
    assert verdict.result(60) == grammar_trials.Verdict(grammar_trials.CRASH, signal.SIGSEGV)
    assert f"signal {int(signal.SIGSEGV)}" in grammar_limits._sentence(verdict.result())
    validated(processors["ours"], {"regex": "t1|t448"})


def test_a_program_that_ends_is_started_again(processors: dict[str, Any]) -> None:
    validated(processors["ours"], FITTING["a regex"])
    trials = vars(processors["ours"])[grammar_limits._TRIALS]
    verdict = trials.verdict(StructuredOutputsParams(json=nested(60)))
    trials._program._process.kill()
    assert verdict.result(100).backend == "xgrammar"
    trials._program._process.kill()
    assert validated(processors["ours"], {"regex": "t1|t60"})._backend == "xgrammar"


def test_trials_end_with_their_front_end(processors: dict[str, Any]) -> None:
    validated(processors["ours"], {"regex": "t1|t70"})
    trials = vars(processors["ours"])[grammar_limits._TRIALS]
    trials.verdict(StructuredOutputsParams(json=nested(447)))
    left = children(processors["ours"])
    with socket.socket(fileno=os.dup(trials._program._connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)  # as it is closed where the front end ends
    gone, alive = psutil.wait_procs(left, 30)
    assert (len(gone), alive) == (len(left), [])


@pytest.mark.parametrize("why", ["off", "no grammar", "external_launcher", "no tokenizer"])
def test_what_is_not_ours_is_left_to_upstream(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    changed = copy.copy(config)
    if why == "external_launcher":
        changed.parallel_config = copy.copy(config.parallel_config)
        changed.parallel_config.distributed_executor_backend = "external_launcher"
    if why == "no tokenizer":
        changed.model_config = copy.copy(config.model_config)
        changed.model_config.skip_tokenizer_init = True
    monkeypatch.setenv(switch.NAME, "-grammar-limits" if why == "off" else "on")
    processor = modules.overlaid(INPUT_PROCESSOR).InputProcessor(changed)
    grammar = None if why == "no grammar" else StructuredOutputsParams(**FITTING["a regex"])
    params = SamplingParams(structured_outputs=grammar)
    asyncio.run(grammar_limits.prepare(processor, params))
    expected = processor.structured_outputs_config
    assert isinstance(expected, StructuredOutputsConfig)
    assert grammar_limits.check(processor, params) is expected
    assert grammar_limits._TRIALS not in vars(processor)


@pytest.mark.parametrize("name", [switch.GRAMMAR_SECONDS, switch.GRAMMAR_MEMORY])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "9" * 12])
def test_other_limits_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    from vllm.v1.readiness.watch import startup

    monkeypatch.setenv(name, value)
    with pytest.raises(switch.NumberError, match=f"{name}.*1 or more, or unset"):
        startup.start(object())
