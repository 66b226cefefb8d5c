"""The installations of a comparison: views of one, pristine and overlaid, and perhaps of a peer."""

from __future__ import annotations

import ctypes
import hashlib
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

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
SIDES = ("stock", "overlaid")
_ORIGIN = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
_PR_SET_PDEATHSIG = 1


class Installations:
    """Stock and overlaid vLLM, each proven by checksum, and a peer.

    Attributes:
        work: directory for the views, and for the files of a run.
        python: the interpreter of the measured processes.
        peer: the peer's version, which is also the name of its side; empty without one.
        views: side to its directory, which goes before the installation's own.
        digests: side to the installation's digest; of the peer, that of its list of files.
    """

    def __init__(self, site: Path, work: Path, python: str, peer: Path | None = None) -> None:
        """Make views of ``site`` and ``peer`` in ``work``; both themselves stay as they are.

        Raises:
            Failure: ``site`` has no vLLM, or one that can be neither overlaid nor made pristine;
                or the interpreter imports another vLLM than that of a view.
        """
        self.site, self.work, self.python = site.resolve(), work, python
        self.peer = ""
        for each in filter(None, (site, peer)):
            if not (each / "vllm").is_dir():
                raise Failure(f"{each} holds no vllm; name a site-packages directory that does")
        self._before = _overlay("status", self.site)["digest"]
        # Views of both, so that not even bytecode is written into the installation. A process
        # that serves from the installation does not serve from the views: hence --force.
        self.views = {side: work / side for side in SIDES}
        stock, overlaid = self.views.values()
        _view(self.site, stock)
        if _overlay("status", stock)["state"] != "pristine":
            _overlay("revert", stock, "--force", "--python", python)
        _view(stock, overlaid)
        _overlay("apply", overlaid, "--force", "--python", python)
        self.digests = {
            "stock": _prove(stock, "pristine"),
            "overlaid": _prove(overlaid, "overlaid"),
        }
        #: Side to the directory that holds its dependencies.
        self._sites = dict.fromkeys(self.views, self.site)
        if peer is not None:
            self._add_peer(peer.resolve())
        for side, view in self.views.items():
            log = work / f"{side}-import.log"
            code = self.run(side, ["-c", _ORIGIN], log, 60, {})
            origin = log.read_text().strip().rpartition("\n")[2]
            if code != 0 or Path(origin).parents[1] != view:
                raise Failure(f"{python} does not import vLLM from the {side} side: {origin}")

    def path(self, side: str) -> str:
        """Return the PYTHONPATH of processes that import this side."""
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        return os.pathsep.join(
            [*map(str, (self.views[side], self._sites[side], SCRIPTS)), *inherited]
        )

    def _add_peer(self, site: Path) -> None:
        records = [*site.glob("vllm*-*.dist-info/RECORD")]
        if len(records) != 1:
            raise Failure(f"{site} holds {len(records)} installations of vLLM; name one of one")
        self.peer = records[0].parent.name.removesuffix(".dist-info").partition("-")[2]
        self.views[self.peer], self._sites[self.peer] = self.work / self.peer, site
        self.digests[self.peer] = hashlib.sha256(records[0].read_bytes()).hexdigest()
        _view(site, self.views[self.peer])

    def start(
        self,
        side: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start Python on one side, in a session of its own; end it with :func:`end`.

        Args:
            side: the installation that the process imports.
            arguments: of the interpreter.
            log: gets stdout and stderr.
            environment: variables to set.
            more: of Popen, such as the working directory.
        """
        # Without the latter, -m looks for vllm in the current directory first.
        python = {"PYTHONPATH": self.path(side), "PYTHONSAFEPATH": "1"}
        with log.open("wb") as sink:
            return subprocess.Popen(
                [self.python, *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, **python},
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 (one thread)
                **more,
            )

    def run(
        self,
        side: str,
        arguments: Sequence[str],
        log: Path,
        timeout: float,
        environment: Mapping[str, str],
        **more: Any,
    ) -> int | None:
        """Run Python on one side, and end every process that it leaves behind.

        The arguments are those of :meth:`start`.

        Returns:
            The exit code, or None if there is none after ``timeout`` seconds.
        """
        process = self.start(side, arguments, log, environment, **more)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)

    def check_untouched(self) -> None:
        """Refuse a measurement that has changed the installation.

        Raises:
            Failure: its digest is not that of the beginning.
        """
        if _overlay("status", self.site)["digest"] != self._before:
            raise Failure(f"{self.site} is not what it was when the run began")


@contextmanager
def installed(site: Path, python: str, peer: Path | None = None) -> Iterator[Installations]:
    """Make the installations in a directory that is removed at the end.

    The directory is beside ``site``, where hard links work, or else in /tmp.

    Raises:
        Failure: see :class:`Installations`.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix="bench-", dir=site.resolve().parent))
    except OSError:  # read-only, or missing
        work = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield Installations(site, work, python, peer)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and every process in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _overlay(command: str, site: Path, *options: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "overlay", command, "--site", str(site), *options, "--json"]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {"error": {"reason": done.stderr.strip()}}
    if error := answer.get("error"):
        parts = (error.get(key) for key in ("subject", "reason", "next"))
        raise Failure(f"overlay {command}: {'; '.join(filter(None, parts))}")
    return answer


def _prove(site: Path, state: str) -> str:
    """Return the digest of an installation that must be in ``state``, by checksum."""
    status = _overlay("status", site)
    if status["state"] != state:
        raise Failure(f"{site} is {status['state']}, and must be {state}")
    return str(status["digest"])


def _view(site: Path, view: Path) -> None:
    """Lay out the vLLM files of ``site`` in ``view``, as hard links where that works."""

    def link(source: str, target: str) -> None:
        try:
            os.link(os.path.realpath(source), target)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(source, target)

    infos = [path for path in site.glob("vllm*-*.dist-info") if (path / "METADATA").is_file()]
    for source in (site / "vllm", *infos):
        # Bytecode that another process is writing has such a name for a moment.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(source, view / source.name, copy_function=link, ignore=unfinished)
