"""The installations of a comparison, and the processes that import them."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from bench.errors import Failure
from bench.harness import command_line, installations
from bench.harness.installations import Installations
from support import sites
from support.processes import gone

pytestmark = pytest.mark.slow  # of the benchmark's programs alone


def test_the_interpreter_is_the_one_behind_a_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child runs in another directory, where the shim would choose another."""
    site = sites.small(tmp_path / "site")
    shim = f'[ -e .python-version ] && exec {sys.executable} "$@"\nexit 127'
    sites.script(tmp_path / "python", shim)
    (tmp_path / ".python-version").write_text("")
    monkeypatch.chdir(tmp_path)
    argv = ["--site", str(site), "--python", "./python", "--out", str(tmp_path / "out")]
    options = command_line.parser("A benchmark.", [])
    args = options.parse_args(argv)
    command_line.prepare(options, args)
    assert (args.site, args.python) == (site, sys.executable)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file's size and time of change."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def views(site: Path, work: Path, python: str = sys.executable) -> Installations:
    work.mkdir()
    return Installations(site, work, python)


def test_an_overlaid_installation_is_measured_against_its_pristine_self(tmp_path: Path) -> None:
    pristine, site = sites.small(tmp_path / "site"), sites.small(tmp_path / "other")
    done = sites.run("apply", "--force", "--site", str(site), "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    before = contents(site)
    overlaid = views(site, tmp_path / "work")
    assert overlaid.digests == views(pristine, tmp_path / "more").digests
    assert overlaid.digests["stock"] != overlaid.digests["overlaid"]
    assert contents(site) == before
    overlaid.check_untouched()
    changed = site / sites.OVERLAY.targets[0]
    changed.write_text(f"{changed.read_text()}# changed\n")
    # Neither may a run have changed an installation, nor somebody before.
    for measure in (overlaid.check_untouched, lambda: views(site, tmp_path / "third")):
        with pytest.raises(Failure, match=f"{changed.name}; is neither upstream's nor"):
            measure()


def test_an_interpreter_that_imports_another_vllm_is_refused(tmp_path: Path) -> None:
    site = sites.small(tmp_path / "site")
    hook = f'PYTHONPATH={sites.UPSTREAM} exec {sys.executable} "$@"'
    python = sites.script(tmp_path / "python", hook)
    with pytest.raises(Failure, match="does not import vLLM from the stock side"):
        views(site, tmp_path / "work", str(python))


def test_a_peer_is_a_side_of_its_own_version(tmp_path: Path) -> None:
    site, other = sites.small(tmp_path / "site"), sites.small(tmp_path / "other")
    (info,) = other.glob("vllm*-*.dist-info")
    shutil.move(info, other / "vllm-0.99.0.dist-info")
    before, work = contents(other), tmp_path / "work"
    work.mkdir()
    three = Installations(site, work, sys.executable, other)
    assert three.peer == "0.99.0"
    assert len({*three.digests.values()}) == 3
    first, second, *_ = three.path("0.99.0").split(os.pathsep)
    assert (Path(first), Path(second)) == (work / "0.99.0", other)
    assert three.path("stock").split(os.pathsep)[1] == str(site)
    assert contents(other) == before


def test_a_peer_without_vllm_is_refused(tmp_path: Path) -> None:
    site, empty = sites.small(tmp_path / "site"), tmp_path / "empty"
    (empty / "vllm").mkdir(parents=True)
    for wrong, reason in ((tmp_path / "none", "holds no vllm"), (empty, "holds 0 installations")):
        with pytest.raises(Failure, match=f"{wrong} {reason}"):
            Installations(site, tmp_path / wrong.name, sys.executable, wrong)


#: Starts a child on a side made up, and waits to be killed.
PARENT = """
import signal, sys
from pathlib import Path
from bench.harness.installations import Installations

stock = Installations.__new__(Installations)
stock.views, stock._sites = {"stock": Path("/side")}, {"stock": Path("/site")}
stock.python = sys.executable
child = "import os, time; print(os.environ['PYTHONPATH'], flush=True); time.sleep(60)"
stock.start("stock", ["-c", child], Path(sys.argv[1]), {})
signal.pause()
"""


def test_a_child_imports_its_side_and_dies_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, log, scripts = f"{uuid.uuid4()}", tmp_path / "log", str(installations.SCRIPTS)
    monkeypatch.setenv("MARK", mark)
    env = {**os.environ, "PYTHONPATH": scripts}
    with subprocess.Popen([sys.executable, "-c", PARENT, str(log)], env=env) as parent:
        deadline = time.monotonic() + 30
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.kill()
    assert log.read_text().strip() == os.pathsep.join(["/side", "/site", scripts, scripts])
    assert gone(f"MARK={mark}")
