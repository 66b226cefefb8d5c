"""apply, revert, status and verify: states, messages, locks and bytecode."""

import contextlib
import importlib.util
import json
import marshal
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import bytecode, interpreter
from overlay.errors import Exit, OverlayError
from overlay.install import exclusive
from overlay.interpreter import MARK
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from support import mini, mounts, sites
from support.sites import OVERLAY, run, snapshot, status

ONE, RECORD = "vllm/one.py", f"{mini.INFO}/RECORD"
#: One of the modules that are added.
MODULE = f"{PACKAGE}/a.py"


def twice(command: str, site: Path) -> None:
    """Run a command twice; the second run must change nothing."""
    states = []
    for said in ("files ", "nothing to do"):
        done = run(command, "--site", site, "--python", sys.executable, code=Exit.DONE)
        assert said in done.stdout
        states.append({path: path.lstat() for path in sorted(site.rglob("*"))})
    assert states[0] == states[1]


def test_apply_then_revert_gives_every_byte_back(real: Path) -> None:
    before = snapshot(real)
    twice("apply", real)
    assert status(real)["state"] == "overlaid"
    assert run("verify", "--site", real).returncode == Exit.DONE
    for path in [*OVERLAY.targets, *OVERLAY.added]:
        assert sha256((real / path).read_bytes()) == OVERLAY.digest_of(path)
        if path.endswith(".py"):
            head = Path(importlib.util.cache_from_source(str(real / path))).read_bytes()[:16]
            source = (real / path).stat()
            assert head[:4] == importlib.util.MAGIC_NUMBER
            assert int.from_bytes(head[8:12], "little") == int(source.st_mtime)
            assert int.from_bytes(head[12:], "little") == source.st_size
    twice("revert", real)
    assert snapshot(real) == before
    assert status(real)["state"] == "pristine"
    assert not [name for name in snapshot(real, bytecode=True) if "readiness" in name]


def test_a_dry_run_writes_nothing_and_says_what_it_would(site: Path) -> None:
    before = snapshot(site, bytecode=True)
    dry = run("apply", "--site", site, "--python", sys.executable, "--dry-run", "--json")
    assert snapshot(site, bytecode=True) == before
    wet = run("apply", "--site", site, "--python", sys.executable, "--json")
    assert json.loads(dry.stdout)["changed"] == json.loads(wet.stdout)["changed"]
    overlaid = snapshot(site, bytecode=True)
    dry = run("revert", "--site", site, "--dry-run", "--json")
    assert snapshot(site, bytecode=True) == overlaid
    assert json.loads(dry.stdout)["changed"] == json.loads(wet.stdout)["changed"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_cache_behind_a_link_is_not_written_to(
    site: Path, worded: Overlay, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    originals = {}
    for number, path in enumerate([*worded.targets, RECORD]):
        file = cache / str(number)
        shutil.move(site / path, file)
        link(file, site / path)
        originals[file] = (file.read_bytes(), file.stat().st_mtime_ns)
    for command in ("apply", "revert"):
        assert run(command, "--site", site).returncode == Exit.DONE
        assert {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in originals} == originals
    for path in worded.targets:
        assert not (site / path).is_symlink()
        assert sha256((site / path).read_bytes()) == worded.pin.upstream[path]


def test_a_directory_that_is_a_link_is_refused(site: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.move(site / "vllm" / "v1", outside)
    (site / "vllm" / "v1").symlink_to(outside)
    before = snapshot(outside)
    refused = run("apply", "--site", site, code=Exit.FOREIGN)
    assert str(site / "vllm" / "v1") in refused.stderr
    assert snapshot(outside) == before


def with_a_space_more(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"A =", b"A  =", 1))


def replaced(by: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        by(file)

    return damage


DAMAGES = {
    "edited": with_a_space_more,
    "emptied": lambda file: os.truncate(file, 0),
    "removed": Path.unlink,
    "a directory": replaced(Path.mkdir),
    "a dangling link": replaced(lambda file: file.symlink_to("/nonexistent/file")),
    "a link to another file": replaced(lambda file: file.symlink_to("/etc/hostname")),
    "a pipe": replaced(os.mkfifo),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_foreign_file_is_refused_and_named(
    site: Path, worded: Overlay, damage: Callable[[Path], None]
) -> None:
    def statuses() -> list[tuple[str, int, int]]:
        paths = (p for p in sorted(site.rglob("*")) if p.name != "__pycache__")
        return [(str(p), p.lstat().st_mode, p.lstat().st_mtime_ns) for p in paths]

    for overlaid in (False, True):
        if overlaid:
            shutil.rmtree(site)
            run("apply", "--site", mini.install(site))
        damage(site / ONE)
        before = statuses()
        for command in ("apply", "revert", "status", "verify"):
            refused = run(command, "--site", site, code=Exit.FOREIGN)
            if command in ("apply", "revert"):
                for part in (str(site / ONE), worded.pin.upstream[ONE], "found", "next"):
                    assert part in refused.stderr
        assert statuses() == before


def test_files_that_we_do_not_change_are_not_read(site: Path) -> None:
    """Other programs may edit them, before apply or after."""
    (site / "vllm" / "v1" / "other.py").symlink_to("/nonexistent/file")
    for command in ("apply", "verify", "status", "revert"):
        assert run(command, "--site", site).returncode == Exit.DONE, command


@pytest.mark.parametrize("link", [False, True])
def test_a_stranger_in_our_directory_is_refused(site: Path, link: bool) -> None:
    """A file, or a link to a directory."""
    run("apply", "--site", site)
    note = site / PACKAGE / "notes.txt"
    note.symlink_to("..") if link else note.write_text("mine")
    refused = run("revert", "--site", site, code=Exit.FOREIGN)
    assert str(note) in refused.stderr
    assert "move it away" in refused.stderr
    note.unlink()
    assert run("revert", "--site", site).returncode == Exit.DONE


@pytest.mark.parametrize(
    "loss", [MODULE, f"{PACKAGE}/provenance/VERSION_PIN", ONE, RECORD, "a row of RECORD"]
)
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_partial_installation_is_named_and_completed(site: Path, loss: str, command: str) -> None:
    whole = {"revert": snapshot(site)}
    upstream = {path: (site / path).read_bytes() for path in (ONE, RECORD)}
    run("apply", "--site", site)
    whole["apply"] = snapshot(site)
    if loss in (ONE, RECORD):
        (site / loss).write_bytes(upstream[loss])
    elif loss == "a row of RECORD":
        record = site / RECORD
        rows = record.read_text().splitlines(keepends=True)
        record.write_text("".join(row for row in rows if not row.startswith(MODULE)))
    else:
        (site / loss).unlink()
    assert status(site)["state"] == "partial"
    assert run("status", "--site", site).returncode == Exit.PARTIAL
    assert run("verify", "--site", site).returncode == Exit.PARTIAL
    assert run(command, "--site", site).returncode == Exit.DONE
    assert snapshot(site) == whole[command]


def test_an_interpreter_imports_what_is_there(site: Path) -> None:
    """Even if there is bytecode of the other state that Python would not check."""
    module = site / ONE
    trusting = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for command, state in (("apply", "overlaid"), ("revert", "pristine")):
        py_compile.compile(str(module), invalidation_mode=trusting)
        trusted = Path(importlib.util.cache_from_source(str(module)))
        other = trusted.with_name("one.cpython-399.opt-2.pyc")
        shutil.copy(trusted, other)
        assert status(site)["stale"] == []
        assert run(command, "--site", site, "--python", sys.executable).returncode == Exit.DONE
        assert not other.exists()
        assert status(site)["state"] == state
        if command == "apply":
            code = Path(importlib.util.cache_from_source(str(module)))
            names = marshal.loads(code.read_bytes()[16:]).co_names
            assert "B" not in names


def test_revert_compiles_what_the_installer_had_compiled(site: Path) -> None:
    compiled, other = map(importlib.util.cache_from_source, mini.PRISTINE)
    with (site / RECORD).open("a") as record:
        record.write(f"{compiled},,\n")
    for command in ("apply", "revert"):
        run(command, "--site", site, "--python", sys.executable, code=Exit.DONE)
        assert (site / compiled).exists()
    assert not (site / other).exists()


def test_an_interpreter_that_cannot_compile_is_refused(site: Path, tmp_path: Path) -> None:
    before = snapshot(site, bytecode=True)
    broken = tmp_path / "python"
    litter = site / "vllm" / "__pycache__" / ".readiness-overlay-one.cpython-311.pyc.1"
    for script, code, message in (
        (f"touch {litter}; echo 'SyntaxError: no' >&2; exit 1", Exit.USAGE, "SyntaxError: no"),
        (
            # It does not say which Python it is, so it is not replaced by that one.
            f'case "$*" in *SOURCE_DATE*) ulimit -f 1; exec {sys.executable} "$@"; esac; exit 3',
            Exit.DENIED,
            "__pycache__: File too large; nothing was written",
        ),
        ("echo a banner", Exit.USAGE, "it wrote no answer"),
        ("echo '[]'", Exit.USAGE, "it wrote no answer"),
        (f"printf '{MARK.decode()}[[\"switch.cpy'".replace("\n", r"\n"), Exit.USAGE, "no answer"),
        (r"printf '\377' >&2; exit 1", Exit.USAGE, "cannot compile"),
        ("kill -9 $$", Exit.USAGE, "exit status -9"),
    ):
        sites.script(broken, script)
        refused = run("apply", "--site", site, "--python", broken, code=code)
        assert message in refused.stderr
        assert code is not Exit.USAGE or str(broken) in refused.stderr
        assert snapshot(site, bytecode=True) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_disk_that_fills_while_modules_are_compiled_is_named(
    tmp_path: Path, ours: Overlay
) -> None:
    """The modules fit on it, and their bytecode does not."""
    data = b"X = %r\n" % [n * 7919 for n in range(100_000)]
    pristine = {**mini.PRISTINE, "vllm/v1/two.py": mini.PRISTINE["vllm/v1/two.py"] + data}
    overlaid = {**pristine, "vllm/one.py": mini.OVERLAID["vllm/one.py"]}
    overlaid["vllm/v1/two.py"] = b"# changed\n" + pristine["vllm/v1/two.py"]
    mini.overlay(ours.root, pristine, overlaid)
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounts.mounted(disk, "-t", "tmpfs", "tmpfs", "-o", "size=2200k"):
        mini.install(disk / "site", pristine)
        before = snapshot(disk / "site")
        target = ("--site", disk / "site", "--python", sys.executable)
        done = run("apply", *target, code=Exit.DENIED)
        assert "__pycache__: No space left on device; nothing was written" in done.stderr
        assert "free some space" in done.stderr
        assert snapshot(disk / "site") == before


def wait_for_end(pid: str) -> None:
    """Wait until a process has ended; a zombie has."""
    end = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path("/proc", pid, "cmdline").read_bytes():
            assert time.monotonic() < end, f"process {pid} is alive"
            time.sleep(0.01)


@pytest.mark.parametrize("command", ["verify", "apply", "revert", "doctor"])
def test_an_interpreter_that_never_answers_is_named(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It is ended with its children, which would keep the lock."""
    run("apply", "--site", site, "--python", sys.executable)
    before = snapshot(site, bytecode=True)
    hangs = sites.script(tmp_path / "python", f"sleep 1000 & echo $! > {tmp_path}/pid; wait")
    for target in (["--python", hangs], ["--site", site, "--python", hangs]):
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "LIMIT", 1.0)
            done = run(command, *target, code=Exit.USAGE)
        assert f"{hangs}: gave no answer within 1 s" in done.stdout + done.stderr
        assert "--python=" in done.stdout + done.stderr
        wait_for_end((tmp_path / "pid").read_text().strip())
    assert snapshot(site, bytecode=True) == before
    assert run("revert", "--site", site).returncode == Exit.DONE


def test_four_at_once_end_with_one(site: Path) -> None:
    alone = mini.install(site.parent / "alone")
    run("apply", "--site", alone, "--python", sys.executable)
    command = [sys.executable, str(sites.tool()), "apply", "--json"]
    command += ["--site", str(site), "--python", sys.executable, "--force"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    reports = [json.loads(child.communicate(timeout=120)[0]) for child in runs]
    assert [child.returncode for child in runs] == [0] * 4
    assert sum(bool(report["changed"]) for report in reports) == 1
    assert snapshot(site) == snapshot(alone)
    assert set(snapshot(site, bytecode=True)) == set(snapshot(alone, bytecode=True))


def test_the_lock_is_waited_for_only_so_long(site: Path) -> None:
    with exclusive(site, 0):
        for command in ("apply", "revert"):
            refused = run(command, "--site", site, "--wait", "0.1", code=Exit.BUSY)
            assert "another run" in refused.stderr
        assert run("status", "--site", site).returncode == Exit.DONE
    assert run("apply", "--site", site).returncode == Exit.DONE
    for wait in ("nan", "-1"):
        refused = run("apply", "--site", site, f"--wait={wait}", code=Exit.USAGE)
        assert f"--wait={wait} is no time" in refused.stderr


#: Of the program that compiles modules alone.
COMPILES = "marshal.dumps(code)"


def test_an_interpreter_that_compiles_holds_the_lock_of_a_killed_run(
    site: Path, tmp_path: Path
) -> None:
    """Until it ends, because it writes files."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    wait = f"kill -9 $PPID; read line < {fifo}"
    text = f'case "$*" in *"{COMPILES}"*) {wait};; esac\nexit 3'
    assert COMPILES in bytecode._COMPILE and COMPILES not in bytecode._COMPARE
    python = sites.script(tmp_path / "python", text)
    with fifo.open("r+b", buffering=0) as end:  # for both ends, so that it waits for no reader
        killed = run("apply", "--site", site, "--python", python, cwd=tmp_path)
        try:
            assert killed.returncode == -signal.SIGKILL, killed
            with pytest.raises(OverlayError), exclusive(site, 0):
                pass
        finally:
            end.write(b"end\n")
        with exclusive(site, 60):
            pass


HOLD = """
import ctypes, mmap, sys, time
file = open(sys.argv[1])
if sys.argv[2] == "map":  # by hand, as the loader does: mmap.mmap would keep the file open
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size, sharing = ctypes.c_size_t(100), mmap.MAP_PRIVATE
    assert libc.mmap(None, size, mmap.PROT_READ, sharing, file.fileno(), ctypes.c_long(0))
if sys.argv[2] != "open":
    file.close()
print("ready", flush=True)
time.sleep(60)
"""


SERVER = ["-m", "vllm.entrypoints.openai.api_server"]


@pytest.mark.parametrize("evidence", ["open", "map", "serve", "module"])
def test_a_process_that_uses_the_installation_is_noticed(
    tmp_path: Path, worded: Overlay, evidence: str
) -> None:
    """By its open files, its maps, or, while it has none, the command that it is."""
    binary = tmp_path / "bin"
    site = mini.install(sites.venv(tmp_path))
    (binary / "vllm").write_text(HOLD)
    program = [str(binary / "vllm")] if evidence == "serve" else ["-c", HOLD]
    command = [str(binary / "python"), *program, str(site / ONE), evidence]
    command += SERVER if evidence == "module" else []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            before = snapshot(site, bytecode=True)
            for extra in ([], ["--dry-run"]):
                refused = run("apply", "--site", site, *extra, code=Exit.BUSY)
                assert f"process {child.pid}" in refused.stderr
                assert "--force" in refused.stderr
            assert snapshot(site, bytecode=True) == before
            assert run("apply", "--site", site, env={"FORCE": "1"}).returncode == Exit.DONE
            assert run("revert", "--site", site).returncode == Exit.BUSY
            assert run("revert", "--site", site, "--force").returncode == Exit.DONE
        finally:
            child.kill()


def test_a_server_of_another_environment_is_left_alone(site: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(site / ONE), "serve", *SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            assert run("apply", "--site", site).returncode == Exit.DONE
        finally:
            child.kill()


def test_revert_asks_nothing_of_an_interpreter_that_it_does_not_need(site: Path) -> None:
    assert run("apply", "--site", site).returncode == Exit.DONE
    python = sites.script(site.parent / "python", "exit 3")
    run("revert", "--site", site, "--python", python, code=Exit.DONE)


def test_neither_vllm_nor_torch_is_imported(site: Path) -> None:
    """Although this interpreter could import both."""
    program = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from overlay import cli\n"
        "for command in ('apply', 'status', 'verify', 'diff', 'revert'):\n"
        "    assert cli.main([command, '--site', sys.argv[2]]) == 0, command\n"
        "assert not {'vllm', 'torch'}.intersection(sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(sites.tool().parent), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bytecode_behind_a_link_is_not_touched(site: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "one.cpython-399.pyc").write_bytes(b"theirs")
    (site / "vllm" / "__pycache__").symlink_to(outside)
    refused = run("apply", "--site", site, "--python", sys.executable, code=Exit.FOREIGN)
    assert "vllm/__pycache__" in refused.stderr
    (site / "vllm" / "__pycache__").unlink()
    run("apply", "--site", site)
    (outside / f"{Path(MODULE).stem}.cpython-399.pyc").write_bytes(b"theirs")
    (site / PACKAGE / "__pycache__").symlink_to(outside)
    assert run("revert", "--site", site).returncode == Exit.FOREIGN
    assert len(list(outside.iterdir())) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount an image's layers")
def test_an_overlay_baked_into_an_image_layer(site: Path, tmp_path: Path) -> None:
    """Overlayfs refuses to rename a directory that comes from a lower layer."""
    before = snapshot(site)
    assert run("apply", "--site", site).returncode == Exit.DONE
    disk = tmp_path / "disk"  # pytest's own directory may itself be on overlayfs
    disk.mkdir()
    with mounts.mounted(disk, "-t", "tmpfs", "tmpfs"):
        shutil.copytree(site, disk / "lower", symlinks=True)
        for name in ("upper", "work", "merged"):
            (disk / name).mkdir()
        layers = ",".join(f"{n}dir={disk / n}" for n in ("lower", "upper", "work"))
        merged = disk / "merged"
        with mounts.mounted(merged, "-t", "overlay", "overlay", "-o", layers):
            assert run("verify", "--site", merged).returncode == Exit.DONE
            (merged / MODULE).unlink()
            assert run("apply", "--site", merged).returncode == Exit.DONE
            assert run("verify", "--site", merged).returncode == Exit.DONE
            run("revert", "--site", merged, code=Exit.DONE)
            assert snapshot(merged) == before
            assert run("apply", "--site", merged).returncode == Exit.DONE


def test_a_stale_copy_of_the_overlay_writes_nothing(tmp_path: Path, ours: Overlay) -> None:
    site = mini.install(tmp_path / "site")
    before = snapshot(site)
    (ours.root / "vendor_overlay" / PACKAGE / "a.py").write_text("X = 2\n")
    for options in (["--dry-run"], []):
        refused = run("apply", "--site", site, *options, code=Exit.FAULT)
        assert "make refresh" in refused.stderr
    assert snapshot(site) == before
    (ours.root / "vendor_overlay" / PACKAGE / "a.py").write_bytes(mini.OURS[f"{PACKAGE}/a.py"])
    run("apply", "--site", site, code=Exit.DONE)
    (site / RECORD).unlink()
    before, patch = snapshot(site), ours.root / "patches" / "0001-all.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-B = 2\n", b"-B = 9\n"))
    for options in (["--dry-run"], []):
        run("revert", "--site", site, *options, code=Exit.FAULT)
    assert snapshot(site) == before


def test_diff_shows_the_seams_in_context(real: Path) -> None:
    pristine = run("diff", "--site", real).stdout
    assert "--- a/vllm/v1/worker/gpu_model_runner.py" in pristine
    assert re.search(r"^\+ .*readiness", pristine, re.MULTILINE)
    assert " class GPUModelRunner(" in pristine
    run("apply", "--site", real)
    assert run("diff", "--site", real).stdout == pristine
    patch = subprocess.run(
        ["git", "apply", "--reverse", "--check", "-"],
        cwd=real,
        input=pristine,
        text=True,
        check=False,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(real.parent)},
    )
    assert patch.returncode == 0


def test_a_path_that_is_too_long_for_a_staged_file_writes_nothing(
    tmp_path: Path, ours: Overlay
) -> None:
    length = 4095 - max(len(f"/{path}") for path in ours.added)
    site = tmp_path
    while len(str(site)) + 250 < length - 2:
        site /= "n" * 240
    mini.install(site := site / ("n" * (length - len(str(site)) - 1)))
    before = snapshot(site, bytecode=True)
    run("apply", "--site", site, code=Exit.DENIED)
    assert snapshot(site, bytecode=True) == before
