"""A process that has imported vLLM, and forks the programs that it is told to run.

Imports are most of what a short run of an engine takes. Run as a program, with what vLLM reads
from the environment when it is imported; each line of stdin is a :class:`Job` as JSON.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Job(NamedTuple):
    """A program to run.

    Attributes:
        program: its file.
        arguments: its arguments.
        paths: directories that its Python searches after those of the launcher.
        environment: variables to set.
        log: the file that gets its output.
        exit_code: the file that is written at its end, and holds its exit code; a file of the
            same name and ``.pid`` is written at its beginning.
    """

    program: str
    arguments: Sequence[str]
    paths: Sequence[str]
    environment: Mapping[str, str]
    log: str
    exit_code: str


def main() -> None:
    """Import what an engine needs, and fork for each job, until stdin ends.

    Nothing of what engines import after they have loaded their plugins is imported here: what
    the overlay and the tests put in its place must come first.
    """
    import torch._inductor.compile_fx  # noqa: F401
    from vllm import LLM, LLMEngine  # noqa: F401

    for line in sys.stdin:
        job = Job(**json.loads(line))
        supervisor = os.fork()
        if supervisor:
            os.waitpid(supervisor, 0)
        elif not os.fork():
            # The launcher does not wait for this one, which only waits for the program.
            os.setsid()
            program = os.fork()
            if not program:
                return _become(job)
            _write(f"{job.exit_code}.pid", program)
            _write(job.exit_code, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
            os._exit(0)
        else:
            os._exit(0)


def _write(file: str, number: int) -> None:
    """Write a file that appears as a whole."""
    partial = Path(f"{file}.part")
    partial.write_text(str(number))
    partial.rename(file)


def _become(job: Job) -> None:
    """Run the program as if this process had been started with it."""
    os.setpgid(0, 0)  # to be ended with all that it starts
    sink = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, sink), (2, sink)):
        os.dup2(source, descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(job.environment)
    os.environ["PYTHONPATH"] = os.pathsep.join([*job.paths, os.environ["PYTHONPATH"]])
    sys.path[:1] = [str(Path(job.program).parent), *job.paths]
    sys.argv = [job.program, *job.arguments]
    runpy.run_path(job.program, run_name="__main__")


if __name__ == "__main__":
    main()
