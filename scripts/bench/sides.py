"""The two sides of a comparison: views of one installation, pristine and overlaid."""

from __future__ import annotations

import argparse
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from overlay import cli
from overlay.errors import OverlayError

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("stock", "overlaid")
#: Announces the probe to vLLM as a plugin, so that every side has the same.
PLUGIN = ROOT / "scripts" / "probe" / "plugin"
_PR_SET_PDEATHSIG = 1
#: Variables that are not handed on to what is measured, and why.
LEFT_OUT = {
    "VLLM_PLUGINS": "it would keep the probe, or its like, from the sides",
    "VLLM_READINESS_PROBE": "every process would write to one file; each gets its own",
    "VLLM_READINESS_SYNC_GUARD": "it slows the overlaid side alone",
}


class Failure(Exception):
    """A step of the run failed; the text says which, and how."""


class Sides:
    """Both installations, each proven by checksum.

    Attributes:
        paths: side to what goes in front of PYTHONPATH.
        digests: side to the installation's digest.
    """

    def __init__(self, site: Path, work: Path, python: str) -> None:
        """Make views of ``site`` in ``work``, one pristine and one overlaid.

        ``site`` itself stays as it is.

        Raises:
            Failure: ``site`` has no vLLM, or one that can be neither overlaid nor made pristine.
        """
        site = site.resolve()
        if not (site / "vllm").is_dir():
            raise Failure(f"{site} holds no vllm; name a site-packages directory that does")
        self._site = site
        self._before = _status(site)["digest"]
        # Views of both, so that not even bytecode is written into the installation. Whoever
        # serves from that with the same interpreter does not serve from them: hence --force.
        stock, overlaid = [work / "pristine", site], [work / "overlaid", site]
        _view(site, stock[0])
        if _status(stock[0])["state"] != "pristine":
            _overlay("revert", "--force", "--site", str(stock[0]), "--python", python)
        _view(stock[0], overlaid[0])
        _overlay("apply", "--force", "--site", str(overlaid[0]), "--python", python)
        self.paths = {"stock": stock, "overlaid": overlaid}
        states = {"stock": "pristine", "overlaid": "overlaid"}
        self.digests = {side: _prove(self.paths[side][0], states[side]) for side in SIDES}

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
        """Run a command on one side and end whatever it started; its exit code, or why none.

        Args:
            side: which installation the command imports.
            command: the program and its arguments.
            log: gets what it prints.
            timeout: in seconds.
            environment: variables to set.
            watch: called about every second until it ends.
            paths: where Python looks besides.
            cwd: the command's working directory.
        """
        inherited = os.environ.get("PYTHONPATH")
        searched = [*self.paths[side], *paths]
        path = [*map(str, searched), *([inherited] if inherited else [])]
        env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)}
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one thread forks here)
            )
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline:
                try:
                    return process.wait(min(1.0, timeout))
                except subprocess.TimeoutExpired:
                    watch()
            return f"no end after {timeout:g} s"
        finally:
            _end(process)

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
            Failure: its files are not those of the beginning.
        """
        if _status(self._site)["digest"] != self._before:
            raise Failure(f"{self._site} is not what it was when the run began")


def target(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Find the installation that is named, or active, and where results go.

    Args:
        parser: ends the program if there is none.
        args: its ``site``, ``python`` and ``out`` are set.
    """
    try:
        found = cli.installation(args)
    except OverlayError as error:
        parser.error(str(error))
    args.site = found.site
    # Links to an environment's interpreter are what makes it the environment's.
    args.python = str(found.interpreter or sys.executable)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
    args.out = args.out or ROOT / "build" / "bench" / now


def leave_out() -> None:
    """Take from the environment what would spoil a comparison; say so, and what is kept."""
    for name, reason in LEFT_OUT.items():
        if os.environ.pop(name, None) is not None:
            print(f"bench: {name} is left out: {reason}", file=sys.stderr)
    if (switch := os.environ.get("VLLM_READINESS")) is not None:
        text = f"bench: VLLM_READINESS={switch} is kept: it is what the overlaid side runs with"
        print(text, file=sys.stderr)


def end_on_signals() -> None:
    """Have what would end this process at once end it so that ``finally`` runs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def work_beside(site: Path) -> Path:
    """A new directory for the overlaid view: where it can be links, or else anywhere."""
    try:
        return Path(tempfile.mkdtemp(prefix="bench-", dir=site.resolve().parent))
    except OSError:  # read-only, or not there
        return Path(tempfile.mkdtemp(prefix="bench-"))


def in_turn(turn: int, sides: Sequence[str] = SIDES) -> tuple[str, ...]:
    """The sides in the order of a round, counted from 0; each is first by turns."""
    first = turn % len(sides)
    return (*sides[first:], *sides[:first])


def by_turns(
    program: Path, site: Path, argv: Sequence[str], rounds: int, timeout: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Have a program measure both sides by turns, each time in a process of its own.

    Args:
        program: with ``argv`` and --child FILE it measures the vLLM that it imports and
            writes what it found as JSON, its "package" among it.
        site: an installation.
        argv: of the program.
        rounds: how often each side is measured.
        timeout: seconds for one child.

    Returns:
        By round, what each side found; and side to its installation's digest.

    Raises:
        Failure: there is no such installation, a side failed, or has changed the installation.
    """
    work = work_beside(site)
    try:
        sides = Sides(site, work, sys.executable)
        made = [_round(sides, work, program, argv, turn, timeout) for turn in range(rounds)]
        sides.check_untouched()
        return made, sides.digests
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _round(
    sides: Sides, work: Path, program: Path, argv: Sequence[str], turn: int, timeout: float
) -> dict[str, Any]:
    """What each side found; they take turns at being the first."""
    found = {}
    out, log = work / "out.json", work / "log"
    command = [sys.executable, str(program.resolve()), *argv, "--child", str(out)]
    for side in in_turn(turn):
        code = sides.run(side, command, log, timeout, {})
        if code != 0:
            raise Failure(f"{side} failed ({code}):\n{log.read_text(errors='replace')[-3000:]}")
        found[side] = json.loads(out.read_text())
        sides.check_import(side, found[side]["package"])
    return found


def _overlay(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "overlay"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"{shlex.join(command)} failed: {done.stdout}{done.stderr}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _view(site: Path, view: Path) -> None:
    """Lay out vLLM's files of ``site`` in ``view``, as links where that works."""
    infos = [path for path in site.glob("vllm*-*.dist-info") if (path / "METADATA").is_file()]
    for source in (site / "vllm", *infos):
        # Bytecode that somebody is just writing has such a name, and not for long.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(source, view / source.name, copy_function=_link, ignore=unfinished)


def _status(site: Path) -> dict[str, Any]:
    return _overlay("status", "--site", str(site))


def _prove(site: Path, state: str) -> str:
    """The digest of an installation that must be in ``state``, by checksum."""
    said = _status(site)
    if said["state"] != state:
        raise Failure(f"{site} is {said['state']}, and has to be {state}")
    digest: str = said["digest"]
    return digest


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _die_with_parent() -> None:
    """Have a child, in a session of its own, end with this process, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and the workers that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
