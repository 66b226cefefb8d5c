"""Bytecode that does not belong to its source is found, and replaced."""

import importlib.util
import json
import marshal
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import bytecode
from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini
from support.sites import run, script, snapshot, status

#: A module of ours, one that the overlay changes, and one of ours that is empty.
OURS, THEIRS, EMPTY = f"{PACKAGE}/a.py", "vllm/one.py", f"{PACKAGE}/b.py"
OTHER = marshal.dumps(compile("print('other code runs')", "x", "exec"))


def swapped(data: bytes) -> bytes:
    return data[:16] + OTHER


def unchecked(data: bytes) -> bytes:
    """The header of a file with the hash of its source, which Python does not check."""
    return data[:4] + b"\1\0\0\0" + data[8:16] + OTHER


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "other code": swapped,
    "unchecked, for another Python": lambda data: b"\0\0\r\n" + unchecked(data)[4:],
    "cut off": lambda data: data[:60],
    "no code": lambda data: data[:16],
    "no code object": lambda data: data[:16] + marshal.dumps(1),
    "a constant": lambda data: data[:16] + marshal.dumps(compile("X = 1.0", "x", "exec")),
    "a reference to no object": lambda data: data[:16] + b"r\xff\xff\xff\x7f",
    "a tuple of 16 GiB": lambda data: data[:16] + b"(\xff\xff\xff\x7f",
}


def compiled(site: Path, path: str, level: int = 0) -> Path:
    """The bytecode of a module at a level of optimisation, which is made if it does not exist."""
    source = str(site / path)
    pyc = importlib.util.cache_from_source(source, optimization=level or "")
    if not os.path.exists(pyc):
        py_compile.compile(source, pyc, optimize=level)
    return Path(pyc)


@pytest.fixture
def overlaid(tmp_path: Path, ours: Overlay) -> Path:
    """The synthetic vLLM, overlaid and compiled."""
    assert EMPTY in ours.added
    site = mini.install(tmp_path / "site")
    run("apply", "--site", site, "--python", sys.executable, code=Exit.DONE)
    return site


def refused(site: Path, pyc: Path) -> None:
    """Every command that proves an installation names the file; exec starts nothing."""
    before = snapshot(site, bytecode=True)
    text = f"{pyc} is not the bytecode of its source; next: "
    target = ("--site", site, "--python", sys.executable)
    for command in (["verify", *target], ["exec", *target, "--", "echo", "served"]):
        done = run(*command, code=Exit.PARTIAL)
        assert (done.stdout, text in done.stderr) == ("", True), done
    assert f"not the bytecode of its source: {pyc}" in run("status", *target).stdout
    assert snapshot(site, bytecode=True) == before
    assert "has nothing to do" not in run("doctor", *target).stdout


@pytest.mark.parametrize("kind", DAMAGE)
def test_bytecode_that_is_not_its_source_s_is_refused_and_compiled_again(
    overlaid: Path, kind: str
) -> None:
    pyc = compiled(overlaid, OURS)
    kept = pyc.read_bytes()
    pyc.write_bytes(DAMAGE[kind](kept))
    refused(overlaid, pyc)
    assert status(overlaid)["stale"] == [str(pyc)]
    target = ("--site", overlaid, "--python", sys.executable)
    done = run("apply", *target, code=Exit.DONE)
    assert "1 files overlaid" in done.stdout
    assert run("verify", *target).returncode == Exit.DONE
    assert pyc.read_bytes() == kept


@pytest.mark.parametrize("path", [THEIRS, EMPTY])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("kind", [swapped, unchecked])
def test_of_every_module_and_level(
    overlaid: Path, path: str, level: int, kind: Callable[[bytes], bytes]
) -> None:
    pyc = compiled(overlaid, path, level)
    target = ("--site", overlaid, "--python", sys.executable)
    assert run("verify", *target).returncode == Exit.DONE
    pyc.write_bytes(kind(pyc.read_bytes()))
    refused(overlaid, pyc)
    assert run("revert", *target).returncode == Exit.DONE
    assert not pyc.exists() or b"other code runs" not in pyc.read_bytes()
    assert status(overlaid)["state"] == "pristine"


def test_of_a_module_that_is_not_overlaid_yet(tmp_path: Path, ours: Overlay) -> None:
    site = mini.install(tmp_path / "site")
    assert THEIRS in ours.targets
    pyc = compiled(site, THEIRS)
    pyc.write_bytes(swapped(pyc.read_bytes()))
    assert status(site)["state"] == "partial"
    assert run("revert", "--site", site).returncode == Exit.DONE
    assert (status(site)["state"], pyc.exists()) == ("pristine", False)


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "of another Python": lambda data: b"\0\0\r\n" + data[4:],
    "of an older source": lambda data: data[:8] + b"\0\0\0\0" + data[12:],
    "with a checked hash": lambda data: data[:4] + b"\3\0\0\0" + data[8:],
    "with flags that do not exist": lambda data: data[:4] + b"\4\0\0\0" + data[8:],
    "without a whole header": lambda data: data[:9],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_python_compiles_anew_by_itself_is_let_be(overlaid: Path, kind: str) -> None:
    pyc = compiled(overlaid, OURS)
    pyc.write_bytes(HARMLESS[kind](swapped(pyc.read_bytes())))
    run("verify", "--site", overlaid, "--python", sys.executable, code=Exit.DONE)


def test_no_comparison_is_an_error(overlaid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit of memory ends every interpreter."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for interpreter in (None, Path("/bin/false")):
        with pytest.raises(OverlayError, match="cannot compare bytecode with its source: exit"):
            bytecode.false(interpreter, [overlaid / OURS])
    assert bytecode.false(None, []) == []


def test_what_imports_have_written_passes(real: Path) -> None:
    """The whole overlay: without columns in the line tables, and with the hashes of sources."""
    run("apply", "--site", real, code=Exit.DONE)
    show = "import compileall, py_compile; "
    show += f"compileall.compile_dir({str(real / 'vllm')!r}, quiet=2, force=True"
    unchecked = ", invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    levels = [(["-X", "no_debug_ranges"], ")"), (["-O"], unchecked), (["-OO"], ")")]
    moved: tuple[list[str], str] = (
        [],
        ", optimize=[0, 1, 2], stripdir='/', prependdir='/else/where')",
    )
    for written in (levels, [moved]):
        for flags, end in written:
            environment = os.environ | {"PYTHONHASHSEED": "7"}
            subprocess.run([sys.executable, *flags, "-c", show + end], env=environment, check=True)
        run("verify", "--site", real, "--python", sys.executable, code=Exit.DONE)


@pytest.mark.parametrize("body", ["exit 3", "kill -9 $$", "echo no"])
def test_an_interpreter_that_does_not_run_is_replaced_by_the_tool_s(
    overlaid: Path, tmp_path: Path, body: str
) -> None:
    """An init container may lack the interpreter of the directory that it verifies."""
    broken = script(tmp_path / "bin" / "python", body)
    target = ("--site", overlaid, "--python", broken)
    assert run("verify", *target).returncode == Exit.DONE
    pyc = compiled(overlaid, OURS)
    pyc.write_bytes(swapped(pyc.read_bytes()))
    assert run("verify", *target).returncode == Exit.PARTIAL


def test_the_report_names_them_for_programs(overlaid: Path) -> None:
    pycs = [compiled(overlaid, path) for path in (THEIRS, OURS)]
    for pyc in pycs:
        pyc.write_bytes(swapped(pyc.read_bytes()))
    report = json.loads(run("verify", "--site", overlaid, "--json").stdout)
    assert (report["state"], report["code"]) == ("partial", Exit.PARTIAL)
    assert report["stale"] == [*map(str, pycs)]
    changed = json.loads(run("apply", "--site", overlaid, "--json").stdout)["changed"]
    assert changed == [os.path.relpath(pyc, overlaid) for pyc in pycs]
