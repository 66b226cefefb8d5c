"""Fix ``grammar-limits``: refuse a grammar that takes too much time or memory.

Stock 0.22.0 validates a grammar in the front end's event loop, compiles it in a thread of the
engine core, and fills a bitmask per token, all without limits. A schema of 19 KB stalls the front
end for many seconds. A regex of 43 characters stalls the engine for seconds per token. A grammar of
400 KB may exhaust memory, and the kernel kills the engine. A compilation cannot be interrupted.

Here a forked process first validates and compiles each grammar under limits, and samples a few
tokens (:mod:`vllm.v1.readiness.frontend.grammar_trials`). A grammar that exceeds a limit is refused
with an error that names the limit.
"""

# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_params
# mirrors: vllm.sampling_params:SamplingParams._validate_structured_outputs

import asyncio
import contextlib
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import grammar_trials
from vllm.v1.readiness.frontend.grammar_trials import Limits, Verdict

if TYPE_CHECKING:
    from vllm.config import StructuredOutputsConfig, VllmConfig
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.engine.input_processor import InputProcessor

logger = init_logger(__name__)

#: Name of the input processor's attribute for its :class:`Trials`.
_TRIALS = "readiness_grammar_trials"
#: Maximum number of cached verdicts, and maximum bytes.
_VERDICTS, _BYTES = 1024, 64 << 20
#: Attempts per trial. Each attempt restarts a trial process that has exited.
_STARTS = 2
_PROGRAM = "from vllm.v1.readiness.frontend import grammar_trials; grammar_trials.main({})"


class ProgramError(RuntimeError):
    """The trial process has exited, or cannot be started."""


def check(
    processor: "InputProcessor", params: "SamplingParams"
) -> "StructuredOutputsConfig | None":
    """Validate the grammar of a request, if it has one, under the limits.

    Waits for the trial, unless :func:`prepare` was called. Changes ``params`` like upstream's
    validation. Returns the configuration for upstream's validation, or None to skip it.

    Raises:
        VLLMValidationError: the grammar exceeds a limit.
        ValueError: upstream's error for an invalid grammar.
    """
    structured = params.structured_outputs
    if structured is None or not _limits_apply(processor):
        return processor.structured_outputs_config
    verdict = _trials(processor).verdict(structured).result()
    _raise(verdict)
    vars(structured).update(verdict.fields)
    return None


async def prepare(processor: "InputProcessor", params: object) -> None:
    """Try the grammar of a request, if it has one, without blocking the event loop.

    Raises:
        VLLMValidationError: the grammar exceeds a limit.
        ValueError: upstream's error for an invalid grammar.
    """
    structured = getattr(params, "structured_outputs", None)
    if structured is None or not _limits_apply(processor):
        return
    trial = asyncio.wrap_future(_trials(processor).verdict(structured))
    _raise(await asyncio.shield(trial))


def _limits_apply(processor: "InputProcessor") -> bool:
    """Return whether the fix is on and the front end accepts grammars.

    False with external_launcher, where each rank has a front end and verdicts might differ.
    """
    return (
        registry.GRAMMAR_LIMITS in switch.enabled()
        and processor.structured_outputs_config is not None
        and processor.tokenizer is not None
        and processor.vllm_config.parallel_config.distributed_executor_backend
        != "external_launcher"
    )


def _raise(verdict: Verdict) -> None:
    if verdict.error is not None:
        raise verdict.error.with_traceback(None)
    if verdict.exceeded is not None:
        raise VLLMValidationError(_sentence(verdict), parameter="structured_outputs")


def _sentence(verdict: Verdict) -> str:
    """Return the error message for a refused grammar."""
    if verdict.exceeded == grammar_trials.UNTRIED:
        return (
            "The grammar of structured_outputs was not tried: the trial process has exited. Check "
            "the server's log, and retry the request."
        )
    if verdict.exceeded == grammar_trials.CRASH:
        return (
            f"The grammar of structured_outputs kills its compiler with signal {verdict.signal}. "
            "Simplify the grammar."
        )
    variable, limit = switch.GRAMMAR_SECONDS, f"{switch.grammar_seconds()} s of CPU time"
    purpose = "to compile and try"
    if verdict.exceeded == grammar_trials.MEMORY:
        variable, limit = switch.GRAMMAR_MEMORY, f"{switch.grammar_memory()} MiB of memory"
    elif verdict.exceeded == grammar_trials.TOKEN_SECONDS:
        seconds = switch.grammar_seconds() / grammar_trials.TOKEN_SECONDS_PART
        limit, purpose = f"{seconds:g} s of CPU time", "per token"
    return (
        f"The grammar of structured_outputs takes more than {limit} {purpose}. Simplify the "
        f"grammar, or restart the server with a larger {variable}."
    )


def _trials(processor: "InputProcessor") -> "Trials":
    """Return a front end's trials, created on first use."""
    trials: Trials | None = vars(processor).get(_TRIALS)
    if trials is None:
        trials = vars(processor).setdefault(_TRIALS, Trials(processor.vllm_config))
    return trials


class Trials:
    """Thread-safe trials of one front end's grammars, with a cache of verdicts."""

    def __init__(self, config: "VllmConfig") -> None:
        self._config = config
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._running: dict[str, Future[Verdict]] = {}
        self._kept: OrderedDict[str, tuple[Verdict, int]] = OrderedDict()
        self._bytes = 0
        self._program: Program | None = None

    def verdict(self, structured: "StructuredOutputsParams") -> "Future[Verdict]":
        """Return a future of the verdict on a grammar. The future never raises."""
        params = pickle.dumps(structured)
        key = hashlib.sha256(params).hexdigest()
        with self._lock:
            if key in self._running:
                return self._running[key]
            future: Future[Verdict] = Future()
            if key in self._kept:
                self._kept.move_to_end(key)
                future.set_result(self._kept[key][0])
                return future
            self._running[key] = future
        threading.Thread(target=self._try, args=(key, params, future), daemon=True).start()
        return future

    def _try(self, key: str, params: bytes, future: "Future[Verdict]") -> None:
        verdict = Verdict(grammar_trials.UNTRIED)
        for _ in range(_STARTS):
            with contextlib.suppress(ProgramError):
                limits = Limits(switch.grammar_seconds(), switch.grammar_memory())
                with self._starting:
                    if self._program is None or self._program.ended:
                        self._program = Program(self._config)
                    program = self._program
                verdict = program.verdict(key, params, limits)
                break
        with self._lock:
            del self._running[key]
            self._keep(key, verdict)
        if verdict.exceeded is not None:
            logger.warning("Readiness overlay: refusing a request: %s", _sentence(verdict))
        future.set_result(verdict)

    def _keep(self, key: str, verdict: Verdict) -> None:
        if verdict.exceeded is not None:
            return
        self._kept[key] = verdict, len(pickle.dumps(verdict))
        self._bytes += self._kept[key][1]
        while len(self._kept) > _VERDICTS or self._bytes > _BYTES:
            _, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size


class Program:
    """The front end's handle of the trial process."""

    def __init__(self, config: "VllmConfig") -> None:
        """Start the process. Raises ProgramError if that fails."""
        import cloudpickle  # type: ignore[import-untyped]

        self.ended = False
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Verdict]] = {}
        ours, theirs = socket.socketpair()
        # No device, no threads (a fork loses them), and no duplicate start-up logs.
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        environment |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= {"MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ProgramError(f"cannot start {sys.executable}: {error}") from error
        self._connection = Connection(ours.detach())
        threading.Thread(target=self._read, args=(cloudpickle.dumps(config),), daemon=True).start()

    def verdict(self, key: str, params: bytes, limits: Limits) -> Verdict:
        """Return the verdict on pickled StructuredOutputsParams, after the trial.

        Raises:
            ProgramError: the trial process has exited without a verdict.
        """
        future: Future[Verdict] = Future()
        try:
            with self._lock:
                if self.ended:
                    raise ProgramError("the trial process has exited")
                self._pending[key] = future
                self._connection.send((key, params, limits))
        except OSError as error:
            raise ProgramError("the trial process has exited") from error
        return future.result()

    def _read(self, config: bytes) -> None:
        """Pass verdicts to their futures until the trial process exits."""
        try:
            with self._process.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(config)
            while True:
                key, verdict = self._connection.recv()
                self._pending.pop(key).set_result(verdict)
        except (EOFError, OSError):
            pass
        with self._lock:
            self.ended = True
            left = list(self._pending.values())
        self._connection.close()
        for future in left:
            future.set_exception(ProgramError("the trial process has exited"))
        logger.warning(
            "Readiness overlay: the trial process for grammars has exited (%d); the next grammar "
            "restarts it",
            self._process.wait(),
        )
