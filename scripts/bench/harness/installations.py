"""The installations of a comparison: views of one installation, pristine and overlaid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.errors import Failure
from bench.harness.kept import end_with_parent

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SIDES = ("stock", "overlaid")
_ASKED = """
import importlib.util, platform
print(platform.python_version(), importlib.util.find_spec("vllm").origin)
"""


class Installations:
    """Stock and overlaid vLLM, each proven by checksum.

    Attributes:
        work: directory for the views, and for the files of a run.
        python: the interpreter of the measured processes.
        python_version: its version.
        paths: side to the entries at the front of its PYTHONPATH.
        digests: side to the installation's digest.
    """

    def __init__(self, site: Path, work: Path, python: str) -> None:
        """Make views of ``site`` in ``work``; ``site`` itself stays as it is.

        Raises:
            Failure: ``site`` has no vLLM, or one that can be neither overlaid nor made pristine;
                or the interpreter imports another vLLM than that of a view.
        """
        self.site, self.work, self.python = site.resolve(), work, python
        if not (self.site / "vllm").is_dir():
            raise Failure(f"{self.site} holds no vllm; name a site-packages directory that does")
        self._before = _status(self.site)["digest"]
        # Views of both, so that not even bytecode is written into the installation. A process
        # that serves from the installation does not serve from the views: hence --force.
        stock, overlaid = [work / "pristine", self.site], [work / "overlaid", self.site]
        _view(self.site, stock[0])
        if _status(stock[0])["state"] != "pristine":
            _overlay("revert", "--force", "--site", str(stock[0]), "--python", python)
        _view(stock[0], overlaid[0])
        _overlay("apply", "--force", "--site", str(overlaid[0]), "--python", python)
        self.paths = {"stock": stock, "overlaid": overlaid}
        self.digests = {
            "stock": _prove(stock[0], "pristine"),
            "overlaid": _prove(overlaid[0], "overlaid"),
        }
        self.python_version = {self._imported(side) for side in SIDES}.pop()

    def add_copy(self) -> None:
        """Make another view of stock, as the side "copy".

        Raises:
            Failure: it is not pristine.
        """
        stock, site = self.paths["stock"]
        self.paths["copy"] = [self.work / "copy", site]
        _view(stock, self.work / "copy")
        self.digests["copy"] = _prove(self.work / "copy", "pristine")

    def start(
        self,
        side: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        paths: Sequence[Path] = (),
        cwd: Path | None = None,
        orphaned: signal.Signals = signal.SIGKILL,
    ) -> subprocess.Popen[bytes]:
        """Start Python on one side, in a session of its own; end it with :func:`end`.

        Args:
            side: the installation that the process imports.
            arguments: of the interpreter.
            log: gets stdout and stderr.
            environment: variables to set.
            paths: further PYTHONPATH entries; ``scripts`` always is one.
            cwd: the process's working directory.
            orphaned: the signal that it gets if this process ends without ending it.
        """
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        path = [*map(str, (*self.paths[side], *paths, SCRIPTS)), *inherited]
        # Without the latter, -m looks for vllm in the current directory first.
        python = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}

        with log.open("wb") as sink:
            return subprocess.Popen(
                [self.python, *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **python},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(orphaned),  # noqa: PLW1509 (one thread)
            )

    def run(
        self,
        side: str,
        arguments: Sequence[str],
        log: Path,
        timeout: float,
        environment: Mapping[str, str],
        paths: Sequence[Path] = (),
        cwd: Path | None = None,
    ) -> int | str:
        """Run Python on one side, and end every process that it leaves behind.

        Args:
            side: see :meth:`start`, as for those not listed here.
            arguments: of the interpreter.
            log: gets stdout and stderr.
            timeout: in seconds.
            environment: variables to set.
            paths: further PYTHONPATH entries.
            cwd: the process's working directory.

        Returns:
            The exit code, or a sentence if there is none in time.
        """
        process = self.start(side, arguments, log, environment, paths, cwd)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"no end after {timeout:g} s"
        finally:
            end(process)

    def check_untouched(self) -> None:
        """Refuse a measurement that has changed the installation.

        Raises:
            Failure: its digest is not that of the beginning.
        """
        if _status(self.site)["digest"] != self._before:
            raise Failure(f"{self.site} is not what it was when the run began")

    def _imported(self, side: str) -> str:
        """Refuse an interpreter that imports another vLLM, by an import hook for example.

        Returns:
            The interpreter's version.
        """
        log = self.work / f"{side}-import.log"
        code = self.run(side, ["-c", _ASKED], log, 60, {})
        version, _, origin = log.read_text().strip().rpartition("\n")[2].partition(" ")
        if code != 0 or Path(origin).parent.parent != self.paths[side][0]:
            raise Failure(f"{self.python} does not import vLLM from the {side} side: {origin}")
        return version


@contextmanager
def installed(site: Path, python: str) -> Iterator[Installations]:
    """Make both installations in a directory that is removed at the end.

    The directory is beside ``site``, where hard links work, or else in /tmp.

    Raises:
        Failure: see :class:`Installations`.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix="bench-", dir=site.resolve().parent))
    except OSError:  # read-only, or missing
        work = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield Installations(site, work, python)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and every process in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(log: Path, lines: int = 40) -> str:
    """Return the last lines of a log, each cut at 300 characters."""
    kept = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:300] for line in kept)


def _overlay(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "overlay", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {"error": {"reason": done.stderr.strip()}}
    if error := answer.get("error"):
        told = (error.get(key) for key in ("subject", "reason", "next"))
        raise Failure(f"overlay {arguments[0]}: {'; '.join(filter(None, told))}")
    return answer


def _status(site: Path) -> dict[str, Any]:
    return _overlay("status", "--site", str(site))


def _prove(site: Path, state: str) -> str:
    """Return the digest of an installation that must be in ``state``, by checksum."""
    status = _status(site)
    if status["state"] != state:
        raise Failure(f"{site} is {status['state']}, and must be {state}")
    digest: str = status["digest"]
    return digest


def _view(site: Path, view: Path) -> None:
    """Lay out the vLLM files of ``site`` in ``view``, as hard links where that works."""
    infos = [path for path in site.glob("vllm*-*.dist-info") if (path / "METADATA").is_file()]
    for source in (site / "vllm", *infos):
        # Bytecode that another process is writing has such a name for a moment.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(source, view / source.name, copy_function=_link, ignore=unfinished)


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
