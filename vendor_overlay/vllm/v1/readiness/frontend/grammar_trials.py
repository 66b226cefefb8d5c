"""The trial process for grammars, which compiles each grammar in a forked child under limits.

:mod:`vllm.v1.readiness.frontend.grammar_limits` starts the process and communicates with it through
a socket. The process has one thread, and loads vLLM, the tokenizer and the backends once. A child
that crashes or exhausts its memory affects nothing else.
"""

# mirrors: vllm.v1.structured_output:StructuredOutputManager.grammar_init
# mirrors: vllm.v1.structured_output:StructuredOutputManager._create_grammar

import contextlib
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
from collections import deque
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_types import (
        StructuredOutputBackend,
        StructuredOutputGrammar,
    )

#: Limits that a grammar may exceed, and other failures of a trial.
SECONDS, MEMORY, TOKEN_SECONDS = "seconds", "memory", "token seconds"
CRASH, UNTRIED = "crash", "untried"

#: Backend name to module and class.
_BACKENDS = {
    "xgrammar": ("backend_xgrammar", "XgrammarBackend"),
    "guidance": ("backend_guidance", "GuidanceBackend"),
    "outlines": ("backend_outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("backend_lm_format_enforcer", "LMFormatEnforcerBackend"),
}
#: Number of tokens that a trial samples from a grammar.
_WALK = 24
#: The limit of seconds divided by this is the limit for the average token of a walk.
TOKEN_SECONDS_PART = 100
#: Extra bytes of address space, for the stacks and arenas of a compiler's threads.
_ROOM = 256 << 20
#: An error is a failed allocation if peak memory is within this many bytes of the limit.
_NEAR = 128 << 20
#: Ratio of the limit of wall time to the limit of CPU time.
_PATIENCE = 4


class Limits(NamedTuple):
    """Limits of one trial: total CPU seconds of all threads, and MiB of memory."""

    seconds: int
    memory: int


class Verdict(NamedTuple):
    """Result of a trial.

    Attributes:
        exceeded: the exceeded limit or other failure, a constant above; None for neither.
        signal: signal number of a :data:`CRASH`.
        fields: fields of StructuredOutputsParams that upstream's validation changed.
        error: error that upstream's validation raised.
        backend: backend that upstream's validation chose.
    """

    exceeded: str | None = None
    signal: int = 0
    fields: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never written to
    error: Exception | None = None
    backend: str | None = None


class _ExceededError(Exception):
    """A grammar exceeds a limit."""


class Backends:
    """Grammar backends of an engine; forked children inherit them."""

    def __init__(self, config: "VllmConfig") -> None:
        """Load the plugins and the tokenizer, like the engine core."""
        from vllm.plugins import load_general_plugins
        from vllm.tokenizers import cached_tokenizer_from_config

        load_general_plugins()
        self.config = config
        self.tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
        self._made: dict[str, StructuredOutputBackend] = {}

    def get(self, name: str) -> "StructuredOutputBackend":
        """Return a backend by name, created on first use."""
        if name not in self._made:
            module, kind = _BACKENDS[name]
            home = import_module(f"vllm.v1.structured_output.{module}")
            backend: type[StructuredOutputBackend] = getattr(home, kind)
            size = self.config.model_config.get_vocab_size()
            self._made[name] = backend(self.config, tokenizer=self.tokenizer, vocab_size=size)
        return self._made[name]

    def candidates(self, name: str) -> list[str]:
        """Return the backends that may compile a grammar validated for backend ``name``.

        With "auto", an engine uses the backend of its first request for all requests.
        """
        if self.config.structured_outputs_config.backend != "auto":
            return [name]
        return list(dict.fromkeys([name, "xgrammar", *self._made]))


def attempt(params: "StructuredOutputsParams", backends: Backends, limits: Limits) -> Verdict:
    """Validate and compile a grammar and sample from it, in this process under its limits.

    A compiler's errors other than failed allocations are left to the engine to report.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output.request import get_structured_output_key

    before = dict(vars(params))
    try:
        SamplingParams(structured_outputs=params)._validate_structured_outputs(
            backends.config.structured_outputs_config, backends.tokenizer
        )
    except Exception as error:
        if _lacks_memory(error):
            return Verdict(MEMORY)
        return Verdict(error=_portable(error))
    name = str(params._backend)
    for candidate in backends.candidates(name):
        try:
            backend = backends.get(candidate)
            _walk(backend.compile_grammar(*get_structured_output_key(params)), backends, limits)
        except _ExceededError as error:
            return Verdict(str(error))
        except Exception as error:
            if _lacks_memory(error):
                return Verdict(MEMORY)
    changed = {key: value for key, value in vars(params).items() if before.get(key) != value}
    return Verdict(fields=changed, backend=name)


def _walk(grammar: "StructuredOutputGrammar", backends: Backends, limits: Limits) -> None:
    """Sample allowed tokens. Raises _ExceededError if they take too long on average."""
    import numpy as np
    import torch

    size = backends.config.model_config.get_vocab_size()
    mask = torch.zeros(1, -(-size // 32), dtype=torch.int32)
    rng = random.Random(0)  # noqa: S311 - the same walk each time
    spent = 0.0
    for _ in range(_WALK):
        begin = time.thread_time()
        mask.fill_(0)
        grammar.fill_bitmask(mask, 0)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:size])
        done = not len(allowed) or not grammar.accept_tokens("trial", [int(rng.choice(allowed))])
        spent += time.thread_time() - begin
        if spent * TOKEN_SECONDS_PART > limits.seconds * _WALK:
            raise _ExceededError(TOKEN_SECONDS)
        if done or grammar.is_terminated():
            break


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error or its cause is a failed allocation.

    Compilers report failed allocations in many ways, such as an error about a thread, so any error
    near the limit counts.
    """
    while error is not None:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return True
        error = error.__cause__ or error.__context__
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/status", encoding="ascii") as file:
        peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmPeak"))
    return limit != resource.RLIM_INFINITY and peak > limit - _NEAR


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled: itself, or a ValueError with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:
        return ValueError(str(error))
    return error.with_traceback(None)


class _Trial(NamedTuple):
    """A running trial."""

    key: str
    pid: int
    deadline: float


class TrialServer:
    """Server of one front end, which runs up to ``at_a_time`` trials concurrently."""

    def __init__(self, front_end: Connection, backends: Backends, at_a_time: int) -> None:
        self._front_end, self._backends, self._at_a_time = front_end, backends, at_a_time
        self._queued: deque[tuple[str, bytes, Limits]] = deque()
        self._running: dict[Connection, _Trial] = {}

    def run(self) -> None:
        """Serve until the front end exits, then kill all trials."""
        try:
            while True:
                ready = wait([self._front_end, *self._running], 0.5 if self._running else None)
                for source in ready:
                    if source is self._front_end:
                        self._queued.append(self._front_end.recv())
                    elif isinstance(source, Connection):
                        self._finish(source)
                self._kill_overdue()
                while self._queued and len(self._running) < self._at_a_time:
                    self._begin(*self._queued.popleft())
        except (EOFError, ConnectionError):
            pass
        finally:
            for trial in self._running.values():
                os.kill(trial.pid, signal.SIGKILL)

    def _begin(self, key: str, params: bytes, limits: Limits) -> None:
        reader, writer = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            try:
                reader.close()
                self._front_end.close()
                _limit(limits)
                structured = pickle.loads(params)  # noqa: S301 - of our front end
                writer.send(attempt(structured, self._backends, limits))
            except MemoryError:
                writer.send(Verdict(MEMORY))
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        writer.close()
        deadline = time.monotonic() + _PATIENCE * limits.seconds
        self._running[reader] = _Trial(key, pid, deadline)

    def _finish(self, reader: Connection) -> None:
        """Send the front end a trial's verdict, or else a verdict based on its exit status."""
        trial = self._running.pop(reader)
        verdict = None
        with reader, contextlib.suppress(EOFError):
            verdict = reader.recv()
        _, status = os.waitpid(trial.pid, 0)
        if verdict is None:
            verdict = _verdict(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
        if verdict.backend is not None:
            with contextlib.suppress(Exception):  # the engine reports the error
                self._backends.get(verdict.backend)  # created for later forks
        self._front_end.send((trial.key, verdict))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for trial in self._running.values():
            if now > trial.deadline:
                os.kill(trial.pid, signal.SIGXCPU)


def _limit(limits: Limits) -> None:
    """Limit this process's CPU time (SIGXCPU ends it) and memory (allocations fail)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM + (limits.memory << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))


def _verdict(number: int) -> Verdict:
    """Return the verdict on a trial killed by signal ``number``; 0 for another exit."""
    if number == signal.SIGXCPU:
        return Verdict(SECONDS)
    if number in (signal.SIGABRT, signal.SIGKILL):  # a failed allocation in C++ or Rust
        return Verdict(MEMORY)
    return Verdict(CRASH, signal=number)


def trials_at_a_time() -> int:
    """Return the number of concurrent trials: the engine's compiler threads, at least 2."""
    return max(2, ((os.cpu_count() or 1) + 1) // 2)


def main(descriptor: int) -> None:
    """Serve a front end by a socket's ``descriptor``, with a pickled VllmConfig from stdin."""
    config = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our front end
    backends = Backends(config)
    chosen = config.structured_outputs_config.backend
    backends.get("xgrammar" if chosen == "auto" else chosen)
    TrialServer(Connection(descriptor), backends, trials_at_a_time()).run()
    os._exit(0)  # skip the slow teardown of vLLM's modules
