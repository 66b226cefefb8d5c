"""`apply --extra`: patches of the user's own, behind the series or a part of it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.patches import Series
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from support import mini, sites
from support.checkouts import git, make
from support.sites import REPO, run, snapshot, status

ONE, TWO = mini.PRISTINE
PART = f"--leave={TWO}"
#: A file that the overlay does not change.
OTHER = "vllm/logger.py"
WHOLE = {**mini.OVERLAID, OTHER: b"import logging\n"}
PATCHES = f"{PACKAGE}/provenance/patches"
HEADER = "Origin: vendor, https://localhost/1\n and more\n\n"


def marked(path: str, text: str) -> bytes:
    """The file with the whole series on, and a comment after some lines and at the end."""
    comment = b"# " + text.encode()
    return re.sub(rb"(?m)^(.*\d)$", rb"\1  " + comment, WHOLE[path]) + comment + b"\n"


def patch_of(folder: Path, files: Mapping[str, bytes], before: Mapping[str, bytes] = WHOLE) -> Path:
    """A directory with one more patch, made of git's diff as docs/operations.md says."""
    tree = folder.parent / "edit"
    for path in files:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(before[path])
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    for path, data in files.items():
        (tree / path).write_bytes(data)
    said = (REPO / "docs" / "operations.md").read_text()
    (command,) = [line for line in said.splitlines() if line.startswith("git diff -U0 ")]
    change = subprocess.run(["sh", "-c", command], cwd=tree, check=True, capture_output=True).stdout
    folder.mkdir(exist_ok=True)
    name = f"{len([*folder.glob('*.patch')]) + 1:04}-some.patch"
    (folder / name).write_bytes(HEADER.encode() + change)
    with (folder / "series").open("a") as series:
        series.write(f"{name}\n")
    return folder


@pytest.fixture(scope="module")
def extra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patch of two files."""
    folder = tmp_path_factory.mktemp("mine") / "extra"
    return patch_of(folder, {path: marked(path, "mine") for path in (ONE, TWO)})


def test_a_patch_is_laid_behind_ours_and_taken_off(site: Path, extra: Path) -> None:
    before = snapshot(site)
    run("apply", "--site", site, code=Exit.DONE)
    ours = {path: (site / path).read_bytes() for path in (ONE, TWO)}
    run("apply", "--site", site, "--extra", extra, code=Exit.DONE)
    for path, data in ours.items():
        laid = (site / path).read_bytes()
        assert b"  # mine\n" in laid
        assert laid.replace(b"  # mine\n", b"\n") == data + b"# mine\n"
    report = status(site)
    assert report["state"] == "overlaid"
    named = {"name": "0001-some.patch", "origin": "vendor, https://localhost/1 and more"}
    assert report["extra"] == [named]
    shown = run("status", "--site", site).stdout
    assert f"extra patch: {named['name']}, origin: {named['origin']}" in shown
    for options in ([], ["--extra", extra]):
        assert run("verify", "--site", site, *options).returncode == Exit.DONE
    again = run("apply", "--site", site, "--extra", extra)
    assert "nothing to do" in again.stdout
    assert f"{PATCHES}/extra-0001-some.patch" in {file["path"] for file in report["files"]}
    kept = (site / PATCHES / "extra-0001-some.patch").read_bytes()
    assert kept == (extra / "0001-some.patch").read_bytes()
    assert run("revert", "--site", site).returncode == Exit.DONE
    assert snapshot(site) == before


def test_a_difference_from_what_is_installed_is_reported(
    site: Path, worded: Overlay, extra: Path, tmp_path: Path
) -> None:
    run("apply", "--site", site, "--extra", extra)
    digest = status(site)["digest"]
    other = shutil.copytree(extra, tmp_path / "other")
    file = other / "0001-some.patch"
    file.write_text(file.read_text().replace("https://localhost/1", "https://localhost/2"))
    for command in ("verify", "status"):
        done = run(command, "--site", site, "--extra", other, code=Exit.FOREIGN)
        text = "with the extra patches 0001-some.patch; this is"
        assert text in done.stderr if command == "verify" else "extra patch: " in done.stdout
    assert run("verify", "--site", site).returncode == Exit.DONE
    replaced = run("apply", "--site", site, "--extra", other)
    patched = f"overlay {worded.pin.overlay} with the extra patches 0001-some.patch"
    assert f"note: replaces {patched} with {patched}\n" in replaced.stdout
    assert status(site)["digest"] != digest
    dropped = run("apply", "--site", site, code=Exit.DONE)
    assert f"replaces {patched} with overlay {worded.pin.overlay}\n" in dropped.stdout
    assert (status(site)["extra"], b"# mine" in (site / ONE).read_bytes()) == ([], False)
    assert run("verify", "--site", site, "--extra", extra).returncode == Exit.FOREIGN


def test_several_patches_build_on_one_another(site: Path, tmp_path: Path) -> None:
    first = marked(ONE, "one")
    folder = patch_of(tmp_path / "extra", {ONE: first})
    patch_of(folder, {ONE: first.replace(b"# one", b"# two")}, {ONE: first})
    assert run("apply", "--site", site, "--extra", folder).returncode == Exit.DONE
    laid = (site / ONE).read_bytes()
    assert (laid.count(b"# one"), laid.count(b"# two")) == (0, first.count(b"# one"))
    assert [each["name"] for each in status(site)["extra"]] == [
        "0001-some.patch",
        "0002-some.patch",
    ]
    assert run("verify", "--site", site).returncode == Exit.DONE


def refused(site: Path, folder: Path, *parts: str, options: Sequence[str] = ()) -> None:
    before = snapshot(site)
    for command in (["apply"], ["apply", "--dry-run"], ["verify"], ["doctor"]):
        done = run(*command, "--site", site, "--extra", folder, *options, code=Exit.USAGE)
        for part in parts:
            assert part in done.stdout + done.stderr
    assert snapshot(site) == before


def test_a_file_that_the_overlay_does_not_change_is_refused(site: Path, tmp_path: Path) -> None:
    folder = patch_of(tmp_path / "extra", {OTHER: marked(OTHER, "mine")})
    refused(
        site,
        folder,
        f"{OTHER}: an extra patch changes it, and the overlay does not",
        "a revert could not verify upstream's bytes of it",
        "`patch -p1`",
    )


SOME = "0001-some.patch"
#: What stands in `series`; some of it is also the new name of the patch.
LISTINGS: dict[str, tuple[str | None, str]] = {
    "no series": (None, "series: cannot be read"),
    "an empty series": ("", "series: lists no patch"),
    "comments alone": (f"# {SOME}\n\n  # none\n", "series: lists no patch"),
    "no patch": (f"{SOME}\n0002-gone.patch\n", "0002-gone.patch: cannot be read"),
    "twice": (f"{SOME}\n{SOME}\n", "lists a patch twice"),
    "elsewhere": (f"../{SOME}\n", "is not the plain name of a patch"),
    "hidden": (f".{SOME}\n", "is not the plain name of a patch"),
    "a comma": ("a,b.patch\n", "is not the plain name of a patch"),
}
#: What is replaced in the patch, once.
EDITS = {
    "other lines": ("-A = 1", "-A = 9", f"{SOME} does not apply: line"),
    "no diff": ("--- a/", "--- ", "expected '--- a/PATH'"),
}


@pytest.mark.parametrize("damage", [*LISTINGS, *EDITS])
def test_what_cannot_be_laid_is_named(site: Path, extra: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(extra, tmp_path / "extra")
    if damage in LISTINGS:
        listing, part = LISTINGS[damage]
        (folder / "series").unlink()
        if listing is not None:
            (folder / "series").write_text(listing)
            if damage == "a comma":
                (folder / SOME).rename(folder / listing.strip())
    else:
        old, new, part = EDITS[damage]
        text = (folder / SOME).read_text()
        (folder / SOME).write_text(text.replace(old, new, 1))
    refused(site, folder, part)
    assert run("apply", "--site", site).returncode == Exit.DONE
    refused(site, folder, part)
    assert run("verify", "--site", site).returncode == Exit.DONE


@pytest.mark.parametrize("what", ["a file", "a series"])
def test_what_is_too_large_is_said_to_be(site: Path, tmp_path: Path, what: str) -> None:
    folder = mini.extra(tmp_path / "extra")
    file = folder / ("series" if what == "a series" else "0001-mine.patch")
    os.truncate(file, (64 << 20) + 1)
    refused(site, folder, f"{file.name}", "too large")


def test_an_empty_name_is_not_the_current_directory(
    site: Path, extra: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(extra)
    before = snapshot(site)
    for command in ("apply", "status", "verify", "diff"):
        done = run(command, "--site", site, "--extra=", code=Exit.USAGE)
        assert "--extra is empty" in done.stderr
    assert snapshot(site) == before


@pytest.mark.parametrize("new", [b"  mine", b"; return"])
def test_a_module_that_no_longer_compiles_is_refused(
    site: Path, extra: Path, tmp_path: Path, new: bytes
) -> None:
    folder = shutil.copytree(extra, tmp_path / "extra")
    file = folder / "0001-some.patch"
    file.write_bytes(file.read_bytes().replace(b"  # mine", new, 1))
    before = snapshot(site, bytecode=True)
    target = ("--site", site, "--python", sys.executable)
    done = run("apply", *target, "--extra", folder, code=Exit.USAGE)
    assert f"{site / ONE}: does not compile with {sys.executable}: " in done.stderr
    assert "remove the extra patch that changes it" in done.stderr
    assert snapshot(site, bytecode=True) == before


def test_a_part_has_no_extra_patches(site: Path, extra: Path) -> None:
    refused(site, extra, "--leave and --extra exclude each other", options=[PART])


def test_the_file_of_somebody_else_s_is_refused_if_a_patch_changes_it(
    site: Path, extra: Path
) -> None:
    (site / TWO).write_text("# theirs\n")
    done = run("apply", "--site", site, "--extra", extra, code=Exit.FOREIGN)
    assert TWO in done.stderr


@pytest.mark.parametrize("path", [OTHER, "vllm/one.py"])
def test_a_record_has_no_file_changed_that_the_overlay_does_not(
    tmp_path: Path, worded: Overlay, path: str
) -> None:
    """A prepared record with an extra patch of that file, which agrees with itself."""
    site = mini.install(tmp_path / "site", {**mini.PRISTINE, OTHER: b"import logging\n"})
    run("apply", "--site", site, "--extra", mini.extra(tmp_path / "extra"), code=Exit.DONE)
    provenance = site / PATCHES
    file, pin = provenance / "extra-0001-mine.patch", provenance.parent / "VERSION_PIN"
    old, text = file.read_bytes(), pin.read_text()
    if path == OTHER:
        evil = b"import evil\n"
        new = old + mini.unified(OTHER, b"import logging\n", evil)
        (site / OTHER).write_bytes(evil)
        text = text.replace(
            "[upstream]\n", f"[upstream]\n{sha256(b'import logging' + bytes([10]))}  {OTHER}\n"
        )
        text = text.replace("[result]\n", f"[result]\n{sha256(evil)}  {OTHER}\n")
    else:  # Its checksum in the record is another one.
        new = old.replace(b"Description: text", b"Description: forged")
    file.write_bytes(new)
    if path == OTHER:
        text = text.replace(sha256(old), sha256(new))
    pin.write_text(text)
    Series.load(provenance)
    before = snapshot(site)
    for name in ("verify", "apply", "revert"):
        run(name, "--site", site, code=Exit.FOREIGN)
    assert snapshot(site) == before


def test_make_takes_them_from_the_command_line_alone(site: Path, extra: Path) -> None:
    ambient = {"EXTRA": str(extra), "LEAVE": TWO}
    root = str(sites.tool().parents[1])
    assert make("-C", root, "apply", f"SITE={site}", **ambient).returncode == 0
    assert (status(site)["left_out"], status(site)["extra"]) == ([], [])
    for named, other in ((f"EXTRA={extra}", f"LEAVE={TWO}"), (f"LEAVE={TWO}", None)):
        done = make("-C", root, "apply", f"SITE={site}", named)
        assert done.returncode == 0, done.stderr
        for target in ("verify", "status", "doctor"):
            assert make("-C", root, target, f"SITE={site}", named).returncode == 0
        if other:
            assert len(status(site)["extra"]) == 1
            assert make("-C", root, "verify", f"SITE={site}", other).returncode != 0
    assert status(site)["left_out"] == ["seeds"]
