"""The installations of a comparison: views of one installation, pristine and overlaid."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.errors import Failure

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SIDES = ("stock", "overlaid")
#: A path entry that announces the probe to vLLM as a plugin, the same for every side.
PLUGIN = SCRIPTS / "probe" / "plugin"
_PR_SET_PDEATHSIG = 1


class Installations:
    """Stock and overlaid vLLM, each proven by checksum.

    Attributes:
        paths: side to the entries at the front of its PYTHONPATH.
        digests: side to the installation's digest.
    """

    def __init__(self, site: Path, work: Path, python: str) -> None:
        """Make views of ``site`` in ``work``; ``site`` itself stays as it is.

        Raises:
            Failure: ``site`` has no vLLM, or one that can be neither overlaid nor made pristine.
        """
        site = site.resolve()
        if not (site / "vllm").is_dir():
            raise Failure(f"{site} holds no vllm; name a site-packages directory that does")
        self._site = site
        self._before = _status(site)["digest"]
        # Views of both, so that not even bytecode is written into the installation. A process
        # that serves from the installation does not serve from the views: hence --force.
        stock, overlaid = [work / "pristine", site], [work / "overlaid", site]
        _view(site, stock[0])
        if _status(stock[0])["state"] != "pristine":
            _overlay("revert", "--force", "--site", str(stock[0]), "--python", python)
        _view(stock[0], overlaid[0])
        _overlay("apply", "--force", "--site", str(overlaid[0]), "--python", python)
        self.paths = {"stock": stock, "overlaid": overlaid}
        self.digests = {
            "stock": _prove(stock[0], "pristine"),
            "overlaid": _prove(overlaid[0], "overlaid"),
        }

    def start(
        self,
        side: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        paths: Sequence[Path] = (),
        cwd: Path | None = None,
        orphaned: signal.Signals = signal.SIGKILL,
    ) -> subprocess.Popen[bytes]:
        """Start a command on one side, in a session of its own; end it with :func:`end`.

        Args:
            side: the installation that the command imports.
            command: the program and its arguments.
            log: gets stdout and stderr.
            environment: variables to set.
            paths: further PYTHONPATH entries; ``scripts`` always is one.
            cwd: the command's working directory.
            orphaned: the signal for the command if this process ends without ending it.
        """
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        path = [*map(str, (*self.paths[side], *paths, SCRIPTS)), *inherited]
        # Without the latter, -m looks for vllm in the current directory first.
        python = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, orphaned)

        with log.open("wb") as sink:
            return subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **python},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 (one thread forks here)
            )

    def run(
        self,
        side: str,
        command: Sequence[str],
        log: Path,
        timeout: float,
        environment: Mapping[str, str],
        watch: Callable[[], None] = lambda: None,
        paths: Sequence[Path] = (),
        cwd: Path | None = None,
    ) -> int | str:
        """Run a command on one side, and end every process that it leaves behind.

        Args:
            side: the installation that the command imports.
            command: the program and its arguments.
            log: gets stdout and stderr.
            timeout: in seconds.
            environment: variables to set.
            watch: called about every second until the command ends.
            paths: further PYTHONPATH entries.
            cwd: the command's working directory.

        Returns:
            The exit code, or a sentence if there is none in time.
        """
        process = self.start(side, command, log, environment, paths, cwd)
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(1.0, timeout))
                watch()
            return f"no end after {timeout:g} s"
        finally:
            end(process)

    def check_import(self, side: str, package: str) -> None:
        """Refuse a measurement of another vLLM than the side's.

        Raises:
            Failure: ``package``, the directory that was imported, is not the side's.
        """
        if Path(package).parent != self.paths[side][0]:
            raise Failure(f"{side} imported vLLM from {package}")

    def check_untouched(self) -> None:
        """Refuse a measurement that has changed the installation.

        Raises:
            Failure: its digest is not that of the beginning.
        """
        if _status(self._site)["digest"] != self._before:
            raise Failure(f"{self._site} is not what it was when the run began")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and every process in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def work_beside(site: Path) -> Path:
    """Make a directory for views: beside ``site``, where hard links work, or else in /tmp."""
    try:
        return Path(tempfile.mkdtemp(prefix="bench-", dir=site.resolve().parent))
    except OSError:  # read-only, or missing
        return Path(tempfile.mkdtemp(prefix="bench-"))


def log_tail(log: Path, lines: int = 40) -> list[str]:
    """Return the last lines of a log, each cut at 300 characters."""
    return [line[:300] for line in log.read_text(errors="replace").splitlines()[-lines:]]


def _overlay(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "overlay", *arguments, "--json"]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise Failure(f"{shlex.join(command)} failed: {done.stdout}{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
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
