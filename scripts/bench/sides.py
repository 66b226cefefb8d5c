"""The two sides of a comparison: a pristine installation, and a view of it overlaid."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("stock", "overlaid")


class Failure(Exception):
    """A step of the run failed; the text says which, and how."""


class Sides:
    """Both installations, each proven by checksum.

    Attributes:
        paths: side to what goes in front of PYTHONPATH.
        digests: side to the installation's digest.
    """

    def __init__(self, site: Path, work: Path, python: str) -> None:
        """Lay the overlay over a view of ``site`` in ``work``; ``site`` stays as it is.

        Raises:
            Failure: ``site`` has no vLLM, is not pristine, or cannot be overlaid.
        """
        site, view = site.resolve(), work / "site"
        if not (site / "vllm").is_dir():
            raise Failure(f"{site} holds no vllm; name a site-packages directory that does")
        self.paths = {"stock": [site], "overlaid": [view, site]}
        infos = [path for path in site.glob("vllm*-*.dist-info") if (path / "METADATA").is_file()]
        for source in (site / "vllm", *infos):
            shutil.copytree(source, view / source.name, copy_function=_link)
        _overlay("apply", "--site", str(view), "--python", python)
        self.digests = {"stock": _prove(site, "pristine"), "overlaid": _prove(view, "overlaid")}

    def run(
        self,
        side: str,
        command: Sequence[str],
        log: Path,
        timeout: float,
        environment: Mapping[str, str],
    ) -> int | str:
        """Run a command on one side and end whatever it started; its exit code, or why none."""
        inherited = os.environ.get("PYTHONPATH")
        path = [*map(str, self.paths[side]), *([inherited] if inherited else [])]
        env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)}
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
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


def work_beside(site: Path) -> Path:
    """A new directory for the overlaid view: where it can be links, or else anywhere."""
    try:
        return Path(tempfile.mkdtemp(prefix="bench-", dir=site.resolve().parent))
    except OSError:  # read-only, or not there
        return Path(tempfile.mkdtemp(prefix="bench-"))


def in_turn(turn: int) -> tuple[str, ...]:
    """The sides in the order of a round; each is first in every other one."""
    return SIDES[::-1] if turn % 2 else SIDES


def heading(device: str, digest: str) -> list[str]:
    """The lines that a report begins with: machine, day, overlay, and the command to repeat it."""
    return [
        f"{device}, {datetime.now(timezone.utc).date()}, overlay digest {digest[:12]}",
        "",
        f"`{shlex.join([Path(sys.executable).name, *sys.argv])}`",
    ]


def by_turns(
    program: Path, site: Path, argv: Sequence[str], rounds: int, timeout: float
) -> tuple[list[dict[str, Any]], str]:
    """Have a program measure both sides by turns, each time in a process of its own.

    Args:
        program: with ``argv`` and --child FILE it measures the vLLM that it imports and
            writes what it found as JSON, its "package" among it.
        site: a pristine installation.
        argv: of the program.
        rounds: how often each side is measured.
        timeout: seconds for one child.

    Returns:
        By round, what each side found; and the overlaid installation's digest.

    Raises:
        Failure: there is no such installation, or a side failed.
    """
    work = work_beside(site)
    try:
        sides = Sides(site, work, sys.executable)
        made = [_round(sides, work, program, argv, turn, timeout) for turn in range(rounds)]
        return made, sides.digests["overlaid"]
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


def _prove(site: Path, state: str) -> str:
    """The digest of an installation that must be in ``state``, by checksum."""
    said = _overlay("status", "--site", str(site))
    if said["state"] != state:
        raise Failure(f"{site} is {said['state']}, and has to be {state}")
    digest: str = said["digest"]
    return digest


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and the workers that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
