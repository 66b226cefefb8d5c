"""vendor, and the archive that dist builds from a commit."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import packaging.version
import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from series import check
from support import sites
from support.checkouts import checkout, git
from support.sites import OVERLAY, REPO, run, run_package, snapshot


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pristine installation, from which upstream's files are taken."""
    return sites.small(tmp_path_factory.mktemp("dist") / "site")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of this checkout as a git repository of one commit."""
    root = checkout(tmp_path / "checkout")
    for name in ("README.md", ".gitignore", ".gitattributes", "LICENSE"):
        shutil.copy(REPO / name, root / name)
    (root / "tests").mkdir()
    (root / "tests" / "t.py").write_text("")
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root: Path, *options: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=all", *options)


def head(root: Path) -> str:
    return git(root, "rev-parse", "HEAD").stdout.strip()


def dist(root: Path, site: Path, **options: int) -> bytes:
    done = run_package("series", "dist", "--site", site, root=root, **options)
    assert done.returncode == Exit.DONE, done.stderr
    archive, wheel = sorted((root / "build" / "dist").iterdir(), key=lambda file: file.suffix)
    version = f"{OVERLAY.pin.overlay}+g{head(root)[:12]}"
    assert archive.name == f"vllm-readiness-overlay-{version}.tar"
    assert wheel.name == f"readiness_overlay-{version}-py3-none-any.whl"
    return archive.read_bytes() + wheel.read_bytes()


def test_it_prints_checksums_and_the_digest_that_apply_gives(root: Path, site: Path) -> None:
    commands = ("dist", "--site", site)
    dry = run_package("series", *commands, "--dry-run", root=root).stdout.splitlines()
    assert not (root / "build").exists()
    lines = run_package("series", *commands, root=root).stdout.splitlines()
    report = json.loads(run_package("series", *commands, "--json", root=root).stdout)
    sums = {path: sha256((root / path).read_bytes()) for path in report["files"]}
    assert len(sums) == 2
    assert report["sha256"] == sums
    run("apply", "--site", site, code=Exit.DONE)
    digest = sites.status(site)["digest"]
    run("revert", "--site", site, code=Exit.DONE)
    assert report["digest_after"] == digest
    told = [*(f"{checksum}  {path}" for path, checksum in sums.items())]
    assert dry[2:] == lines[2:] == [*told, f"digest after apply: {digest}"]


def names(root: Path, site: Path) -> list[str]:
    """The names of the archive and the wheel, without their endings and tags."""
    done = run_package("series", "dist", "--site", site, "--dry-run", "--json", root=root)
    files = [Path(path).name for path in json.loads(done.stdout)["files"]]
    tar, wheel = "vllm-readiness-overlay-", "readiness_overlay-"
    assert files[0].startswith(tar)
    assert files[1].startswith(wheel)
    return [
        files[0].removeprefix(tar).removesuffix(".tar"),
        files[1].removeprefix(wheel).removesuffix("-py3-none-any.whl"),
    ]


def test_only_the_tagged_commit_has_the_name_of_the_release(
    root: Path, site: Path, tmp_path: Path
) -> None:
    version = OVERLAY.pin.overlay
    seen = set()
    for tag in (f"v{version}/x", f"v{version}1", f"x{version}", "v0.0.1"):
        git(root, "tag", tag)
    git(root, "branch", f"v{version}")
    git(root, "config", "core.abbrev", "5")
    for number in range(2):
        (root / "README.md").write_text(f"{number}\n")
        commit(root)
        label = f"{version}+g{head(root)[:12]}"
        assert names(root, site) == [label] * 2
        assert str(packaging.version.Version(label)) == label
        seen.add(label)
    assert len(seen) == 2
    git(root, "tag", "--delete", f"v{version}/x")
    for options in ([], ["--force", "--annotate", "--message=release"]):
        git(root, "tag", *options, f"v{version}")
        assert names(root, site) == [version] * 2
    git(root, "clone", "--quiet", "--depth=1", f"file://{root}", str(tmp_path / "shallow"))
    assert names(tmp_path / "shallow", site) == [version] * 2
    commit(root, "--allow-empty")
    assert names(root, site) == [f"{version}+g{head(root)[:12]}"] * 2


def test_vendored_copies_are_the_pinned_ones(root: Path, site: Path) -> None:
    for line in ("wrote vendor_overlay/vllm/envs.py", "nothing to do"):
        done = run_package("series", "vendor", "--site", site, root=root)
        assert line in done.stdout, done.stderr
    for path in OVERLAY.targets:
        data = (root / "vendor_overlay" / path).read_bytes()
        assert sha256(data) == OVERLAY.pin.result[path]


def test_the_archive_is_the_same_from_the_same_commit(
    root: Path, site: Path, tmp_path: Path
) -> None:
    """Whatever the clone's attributes, settings, umask and untracked files are."""
    (root / "README.md").write_text("$Format:%H$ $Id$\n")
    (root / ".gitattributes").write_text("*.md export-subst ident\nLICENSE export-ignore\n")
    program = root / "scripts" / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    commit(root)
    clone = tmp_path / "elsewhere"
    git(root, "clone", "--quiet", str(root), str(clone))
    attributes = "scripts/** export-ignore\npatches/* text eol=crlf\n*.md !export-subst ident\n"
    (clone / ".git" / "info" / "attributes").write_text(attributes)
    for setting in ("core.autocrlf=true", "tar.umask=0777", "log.showSignature=true"):
        git(clone, "config", *setting.split("="))
    git(clone, "replace", "HEAD:README.md", "HEAD:VERSION_PIN")
    (root / "patches" / "untracked.patch").write_text("not in the commit")
    overlaid = sites.small(tmp_path / "overlaid")
    assert run("apply", "--site", overlaid).returncode == Exit.DONE
    data = dist(root, site, umask=0o022)
    assert dist(clone, overlaid, umask=0o077) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:  # The wheel is behind its end.
        modes = {member.name.partition("/")[2]: member.mode for member in tar}
        readme = tar.extractfile(next(m for m in tar if m.name.endswith("README.md")))
        assert readme
        assert readme.read() == b"$Format:%H$ $Id$\n"
    assert modes["scripts/program"] == 0o755
    assert modes["VERSION_PIN"] == modes["LICENSE"] == 0o644
    assert {"scripts/overlay/__main__.py", "scripts/overlay/pin.py"} < set(modes)
    assert {f"vendor_overlay/{path}" for path in OVERLAY.targets} < set(modes)
    left_out = ("tests", "patches/untracked", ".gitattributes")
    assert not [name for name in modes if name.startswith(left_out)]


def test_a_commit_that_contradicts_its_pin_is_refused(root: Path, site: Path) -> None:
    (root / "vendor_overlay" / PACKAGE / "version.py").write_text("")
    commit(root)
    refused = run_package("series", "dist", "--site", site, root=root)
    assert refused.returncode == Exit.FAULT
    assert "VERSION_PIN expects" in refused.stderr
    assert not (root / "build" / "dist").exists()


def test_a_clone_that_rewrites_line_ends_is_whole(root: Path, site: Path, tmp_path: Path) -> None:
    clone = tmp_path / "elsewhere"
    settings = ["-c", "core.autocrlf=true", "-c", "core.eol=crlf"]
    git(root, "clone", "--quiet", *settings, str(root), str(clone))
    assert list(check.complaints(clone, lambda path: (site / path).read_bytes())) == []
    files = [path for path in clone.rglob("*") if ".git" not in path.parts and path.is_file()]
    files = [path for path in files if path.suffix != ".gz"]  # compressed, any bytes
    assert files
    assert not [path for path in files if b"\r\n" in path.read_bytes()]


def test_the_archive_applies_without_network_git_or_index(
    root: Path, site: Path, tmp_path: Path
) -> None:
    with tarfile.open(fileobj=io.BytesIO(dist(root, site))) as tar:
        tar.extractall(tmp_path / "image", filter="data")
    (unpacked,) = (tmp_path / "image").iterdir()
    target = sites.small(tmp_path / "target")
    before = snapshot(target)
    unshare = shutil.which("unshare") if os.geteuid() == 0 else None
    offline = [unshare, "--net"] if unshare else []
    tool = [*offline, sys.executable, str(unpacked / "scripts" / "overlay")]
    version = subprocess.check_output([*tool, "--version"], text=True)
    label = f"{OVERLAY.pin.overlay}+g{head(root)[:12]}"
    assert version == f"overlay {label} for vLLM {OVERLAY.pin.release}\n"
    for command in ("apply", "verify", "revert", "apply"):
        if command == "revert":
            (unpacked / "vendor_overlay" / OVERLAY.targets[0]).unlink()
        environment = {"PATH": "/nonexistent"}
        done = subprocess.run([*tool, command, "--site", target], env=environment, check=False)
        assert done.returncode == Exit.DONE
        if command == "revert":
            assert snapshot(target) == before
