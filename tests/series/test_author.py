"""vendor, edit, refresh and dist."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.pin import sha256
from overlay.source import Overlay
from series import check
from series import edit as editing
from series import tree as edit_tree
from series.check import FIELDS
from series.upstream import from_installation
from support import mini, sites
from support.sites import OVERLAY, REPO, run, run_package, snapshot

series = partial(run_package, "series")

SHIPPED = ("VERSION_PIN", "patches", "scripts", "vendor_overlay/vllm/v1/readiness")
MESSAGE = "Description: Another seam\n why\n" + "".join(
    f"{name}: text\n" for name in FIELDS if name != "Description"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pristine installation for the author to take upstream's files from."""
    return sites.small(tmp_path_factory.mktemp("author") / "site")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout, to be changed."""
    root = tmp_path / "checkout"
    for name in SHIPPED:
        source, target = REPO / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    return root


def upstream(path: str) -> bytes:
    return (sites.UPSTREAM / path).read_bytes()


def complaints(root: Path) -> list[str]:
    return list(check.complaints(root, upstream))


def commit(tree: Path, message: str = MESSAGE) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    command = ["git", *identity, "commit", "--quiet", "--all", "--file=-"]
    subprocess.run(command, cwd=tree, input=message.encode(), check=True)


def test_this_checkout_is_in_order() -> None:
    assert complaints(REPO) == []


def test_a_patch_that_no_longer_applies_is_complained_of(checkout: Path) -> None:
    patch = next((checkout / "patches").glob("0003-*"))
    patch.write_bytes(patch.read_bytes().replace(b"@@ -424,0 +426 @@", b"@@ -424,0 +427 @@"))
    (found,) = complaints(checkout)
    assert "does not apply" in found
    assert patch.name in found


def test_an_unlisted_patch_is_complained_of(checkout: Path) -> None:
    (checkout / "patches" / "0009-forgotten.patch").write_text("")
    assert complaints(checkout) == ["patches/0009-forgotten.patch is not listed in patches/series"]


@pytest.mark.parametrize("stale", ["vendor_overlay/vllm/v1/readiness/switch.py", "VERSION_PIN"])
def test_a_stale_checksum_is_complained_of(checkout: Path, stale: str) -> None:
    with (checkout / stale).open("a") as file:
        file.write("# a word more\n")
    assert complaints(checkout) == ["VERSION_PIN is stale: run `make refresh`"]


def test_a_header_without_its_fields_is_complained_of(checkout: Path) -> None:
    patch = next((checkout / "patches").glob("0002-*"))
    patch.write_bytes(patch.read_bytes().replace(b"Drop-When:", b"Never-Mind:"))
    assert f"patches/{patch.name}: the header lacks Drop-When" in complaints(checkout)


def test_edit_and_refresh_change_nothing_by_themselves(checkout: Path, site: Path) -> None:
    before = snapshot(checkout)
    assert series("edit", "--site", site, root=checkout).returncode == Exit.DONE
    tree = checkout / "build" / "edit"
    for path in OVERLAY.targets:
        assert sha256((tree / path).read_bytes()) == OVERLAY.pin.result[path]
    log = ["git", "log", "--format=%s", "pristine..HEAD"]
    subjects = subprocess.run(log, cwd=tree, capture_output=True, text=True, check=True).stdout
    assert len(subjects.splitlines()) == len(OVERLAY.series.patches)
    refreshed = series("refresh", root=checkout)
    assert refreshed.returncode == Exit.DONE, refreshed.stderr
    assert "nothing to do" in refreshed.stdout
    shutil.rmtree(checkout / "build")
    assert snapshot(checkout) == before


def test_an_edit_becomes_a_patch(checkout: Path, site: Path) -> None:
    series("edit", "--site", site, root=checkout)
    tree = checkout / "build" / "edit"
    runner = tree / "vllm" / "v1" / "worker" / "gpu_model_runner.py"
    runner.write_bytes(runner.read_bytes().replace(b"import gc\n", b"import gc  # seam\n"))
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.USAGE
    assert "uncommitted" in refused.stderr
    assert series("edit", "--site", site, root=checkout).returncode == Exit.BUSY
    commit(tree)
    assert series("edit", "--site", site, root=checkout).returncode == Exit.BUSY
    before = snapshot(checkout / "patches")
    dry = series("refresh", "--dry-run", root=checkout).stdout
    assert snapshot(checkout / "patches") == before
    written = series("refresh", root=checkout).stdout
    assert dry.replace("would write", "wrote") == written
    name = f"{len(before):04}-another-seam.patch"  # the series is one file among them
    patch = (checkout / "patches" / name).read_text()
    assert patch.endswith("-import gc\n+import gc  # seam\n")
    assert patch.startswith("Description: Another seam\n why\n")
    assert complaints(checkout) == []
    applied = Overlay.load(checkout)
    assert b"# seam" in applied.overlaid_bytes(
        "vllm/v1/worker/gpu_model_runner.py", upstream("vllm/v1/worker/gpu_model_runner.py")
    )
    assert series("edit", "--site", site, root=checkout).returncode == Exit.DONE
    subprocess.run(["git", "reset", "--quiet", "--hard", "HEAD~1"], cwd=tree, check=True)
    assert f"{name} (removed)" in series("refresh", root=checkout).stdout
    shutil.rmtree(checkout / "build")
    assert (checkout / "VERSION_PIN").read_bytes() == (REPO / "VERSION_PIN").read_bytes()


def test_a_commit_that_is_no_patch_is_refused(checkout: Path, site: Path) -> None:
    series("edit", "--site", site, root=checkout)
    tree = checkout / "build" / "edit"
    runner = tree / "vllm" / "envs.py"
    before = snapshot(checkout / "patches")
    runner.write_bytes(runner.read_bytes() + b"# more\n")
    commit(tree, "no header\n")
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.USAGE
    assert "Drop-When" in refused.stderr
    subprocess.run(["git", "reset", "--quiet", "--hard", "saved"], cwd=tree, check=True)
    (tree / "vllm" / "new.py").write_text("x\n")
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    commit(tree)
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.USAGE
    assert "vllm/new.py" in refused.stderr
    assert "vendor_overlay" in refused.stderr
    assert snapshot(checkout / "patches") == before


def test_edit_can_be_run_again_and_again(checkout: Path, site: Path) -> None:
    for _ in range(4):
        assert series("edit", "--site", site, root=checkout).returncode == Exit.DONE
    assert "nothing to do" in series("refresh", root=checkout).stdout


def test_a_commit_that_was_dropped_is_work_too(checkout: Path, site: Path) -> None:
    series("edit", "--site", site, root=checkout)
    tree = checkout / "build" / "edit"
    subprocess.run(["git", "reset", "--quiet", "--hard", "HEAD~1"], cwd=tree, check=True)
    assert series("edit", "--site", site, root=checkout).returncode == Exit.BUSY


@pytest.mark.parametrize("change", ["another's patch", "another's edit"])
def test_refresh_does_not_overwrite_what_came_since_edit(
    checkout: Path, site: Path, change: str
) -> None:
    series("edit", "--site", site, root=checkout)
    if change == "another's patch":
        (checkout / "patches" / "0009-draft.patch").write_text("draft")
    else:
        patch = next((checkout / "patches").glob("0003-*"))
        patch.write_bytes(patch.read_bytes().replace(b"How: ", b"How:  "))
    before = snapshot(checkout / "patches")
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.BUSY
    assert "make edit" in refused.stderr
    assert snapshot(checkout / "patches") == before


def test_refresh_waits_for_the_end_of_a_rebase(checkout: Path, site: Path) -> None:
    series("edit", "--site", site, root=checkout)
    tree = checkout / "build" / "edit"
    before = snapshot(checkout / "patches")
    subprocess.run(["git", "checkout", "--quiet", "--detach", "pristine"], cwd=tree, check=True)
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.BUSY
    assert "rebase" in refused.stderr
    assert snapshot(checkout / "patches") == before
    assert series("edit", "--site", site, root=checkout).returncode == Exit.BUSY
    subprocess.run(["git", "checkout", "--quiet", "series"], cwd=tree, check=True)
    assert series("refresh", root=checkout).returncode == Exit.DONE


def test_refresh_does_not_follow_an_edit_that_was_cut_off(checkout: Path, site: Path) -> None:
    series("edit", "--site", site, root=checkout)
    tree = checkout / "build" / "edit"
    before = snapshot(checkout / "patches")
    overlay = check.load_unproven(checkout)
    upstream_files = from_installation(locate(site=str(site)), OVERLAY)
    commits = 0

    def cut(folder: Path, message: str) -> None:
        nonlocal commits
        commits += 1
        if commits > 2:
            raise KeyboardInterrupt
        commit_for_real(folder, message)

    commit_for_real = edit_tree.commit
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(edit_tree, "commit", cut)
        editing.edit(overlay, upstream_files, dry_run=False)
    subprocess.run(["git", "reset", "--quiet", "--hard"], cwd=tree, check=True)
    assert series("refresh", root=checkout).returncode == Exit.BUSY
    assert snapshot(checkout / "patches") == before
    assert series("edit", "--site", site, root=checkout).returncode == Exit.DONE
    assert "nothing to do" in series("refresh", root=checkout).stdout


def test_edit_refuses_a_draft_that_refresh_would_remove(checkout: Path, site: Path) -> None:
    (checkout / "patches" / "0009-draft.patch").write_text("draft")
    refused = series("edit", "--site", site, root=checkout)
    assert refused.returncode == Exit.BUSY
    assert "0009-draft.patch" in refused.stderr
    assert not (checkout / "build").exists()


def test_a_patch_changed_by_hand_needs_the_edit_tree(checkout: Path, site: Path) -> None:
    patch = next((checkout / "patches").glob("0003-*"))
    patch.write_bytes(patch.read_bytes().replace(b"How: ", b"How: Well, "))
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.USAGE
    assert "make edit" in refused.stderr
    assert series("edit", "--site", site, root=checkout).returncode == Exit.DONE
    assert series("refresh", root=checkout).returncode == Exit.DONE
    assert complaints(checkout) == []


def test_only_files_with_plain_names_are_pinned(checkout: Path) -> None:
    package = checkout / "vendor_overlay" / "vllm" / "v1" / "readiness"
    (package / ".switch.py.swp").write_text("")
    (package / "switch.py~").write_text("")
    assert "nothing to do" in series("refresh", root=checkout).stdout
    (package / "a b.py").write_text("")
    refused = series("refresh", root=checkout)
    assert refused.returncode == Exit.FAULT
    assert "a b.py" in refused.stderr


def test_refresh_follows_our_own_modules_without_an_edit_tree(checkout: Path) -> None:
    module = checkout / "vendor_overlay" / "vllm" / "v1" / "readiness" / "version.py"
    module.write_text(module.read_text().replace(Overlay.load(REPO).pin.overlay, "9.9.9"))
    assert complaints(checkout) != []
    assert series("refresh", root=checkout).stdout == "wrote VERSION_PIN\n"
    assert complaints(checkout) == []
    assert Overlay.load(checkout).pin.overlay == "9.9.9"


def test_vendored_copies_carry_the_notice(checkout: Path, site: Path) -> None:
    assert series("vendor", "--site", site, root=checkout).returncode == Exit.DONE
    for path in OVERLAY.targets:
        data = (checkout / "vendor_overlay" / path).read_bytes()
        assert sha256(data) == OVERLAY.pin.result[path]
        head = b"".join(data.splitlines(keepends=True)[:5])
        assert b"Changed by vllm-readiness-overlay" in head
        assert b"provenance/patches" in head
    assert "nothing to do" in series("vendor", "--site", site, root=checkout).stdout


def test_a_wheel_that_is_not_pinned_is_refused(checkout: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.22.0-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    refused = series("vendor", "--wheel", wheel, root=checkout)
    assert refused.returncode == Exit.RELEASE
    assert sha256(b"PK") in refused.stderr


@pytest.fixture
def repository(checkout: Path) -> Path:
    """The copy as a git repository of one commit."""
    for file in ("README.md", "Makefile", ".gitignore", "LICENSE"):
        shutil.copy(REPO / file, checkout)
    (checkout / "tests").mkdir()
    (checkout / "tests" / "t.py").write_text("")
    for folder in checkout.rglob("__pycache__"):
        shutil.rmtree(folder)
    subprocess.run(["git", "init", "--quiet"], cwd=checkout, check=True)
    subprocess.run(["git", "add", "--all"], cwd=checkout, check=True)
    commit(checkout, "all")
    return checkout


def test_the_archive_is_the_same_from_the_same_commit(
    repository: Path, site: Path, tmp_path: Path
) -> None:
    archives = []
    clone = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", repository, clone], check=True)
    (repository / "patches" / "untracked.patch").write_text("not in the commit")
    overlaid = sites.small(tmp_path / "overlaid")
    run("apply", "--site", overlaid)
    for root, source in ((repository, site), (clone, overlaid)):
        done = series("dist", "--site", source, root=root)
        assert done.returncode == Exit.DONE, done.stderr
        (archive,) = (root / "build" / "dist").iterdir()
        archives.append((archive.name, archive.read_bytes()))
    assert archives[0] == archives[1]
    assert archives[0][0] == f"vllm-readiness-overlay-{OVERLAY.pin.overlay}.tar"
    with tarfile.open(fileobj=io.BytesIO(archives[0][1])) as tar:
        names = [member.name.partition("/")[2] for member in tar]
    assert {"scripts/overlay/__main__.py", "scripts/overlay/RELEASES"} < set(names)
    assert set(OVERLAY.targets) < {name.removeprefix("vendor_overlay/") for name in names}
    assert not [name for name in names if name.startswith(("tests", "patches/untracked"))]


def test_nobody_s_attributes_or_settings_change_the_archive(
    repository: Path, site: Path, tmp_path: Path
) -> None:
    (repository / "README.md").write_text("$Format:%H$ $Id$\n")
    (repository / ".gitattributes").write_text("*.md export-subst ident\nLICENSE export-ignore\n")
    program = repository / "scripts" / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    commit(repository)
    clone = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", repository, clone], check=True)
    own = "scripts/** export-ignore\npatches/* text eol=crlf\n*.md !export-subst ident\n"
    (clone / ".git" / "info" / "attributes").write_text(own)
    for setting in ("core.autocrlf=true", "tar.umask=0777", "log.showSignature=true"):
        subprocess.run(["git", "config", *setting.split("=")], cwd=clone, check=True)
    replace = ["git", "replace", "HEAD:README.md", "HEAD:VERSION_PIN"]
    subprocess.run(replace, cwd=clone, check=True)
    archives = []
    for root, umask in ((repository, 0o022), (clone, 0o077)):
        done = series("dist", "--site", site, root=root, umask=umask)
        assert done.returncode == Exit.DONE, done.stderr
        (archive,) = (root / "build" / "dist").iterdir()
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as tar:
        modes = {member.name.partition("/")[2]: member.mode for member in tar}
        read = tar.extractfile(next(m for m in tar if m.name.endswith("README.md")))
        assert read
        assert read.read() == b"$Format:%H$ $Id$\n"
    assert modes["scripts/program"] == 0o755
    assert modes["VERSION_PIN"] == modes["LICENSE"] == 0o644
    assert ".gitattributes" not in modes


def test_the_archive_holds_no_links(repository: Path, site: Path) -> None:
    (repository / "scripts" / "link").symlink_to("/etc/passwd")
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    commit(repository)
    refused = series("dist", "--site", site, root=repository)
    assert refused.returncode == Exit.FAULT
    assert "scripts/link: is a link" in refused.stderr


def test_a_clone_that_rewrites_line_ends_is_whole(
    repository: Path, site: Path, tmp_path: Path
) -> None:
    shutil.copy(REPO / ".gitattributes", repository)
    subprocess.run(["git", "add", "--all"], cwd=repository, check=True)
    commit(repository)
    clone = tmp_path / "elsewhere"
    settings = ["-c", "core.autocrlf=true", "-c", "core.eol=crlf"]
    subprocess.run(["git", "clone", "--quiet", *settings, repository, clone], check=True)
    assert complaints(clone) == []
    target = sites.small(tmp_path / "target")
    for name in ("apply", "verify"):
        done = run(name, "--site", target, root=clone)
        assert done.returncode == Exit.DONE, done.stderr
    assert series("dist", "--site", site, root=clone).returncode == Exit.DONE
    crlf = [p for p in clone.rglob("*") if ".git" not in p.parts and p.is_file()]
    assert crlf
    assert not [path for path in crlf if b"\r\n" in path.read_bytes()]


def test_the_archive_applies_without_network_git_or_index(
    repository: Path, site: Path, tmp_path: Path
) -> None:
    series("dist", "--site", site, root=repository)
    (archive,) = (repository / "build" / "dist").iterdir()
    (tmp_path / "image").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "image"], check=True)
    (root,) = (tmp_path / "image").iterdir()
    target = sites.small(tmp_path / "target")
    before = snapshot(target)
    bare = {"PATH": "/nonexistent"}
    command = [sys.executable, str(root / "scripts" / "overlay")]
    unshare = shutil.which("unshare") if os.geteuid() == 0 else None
    offline = [unshare, "--net"] if unshare else []
    for name in ("apply", "verify"):
        arguments = [name, "--site", str(target)]
        done = subprocess.run([*offline, *command, *arguments], env=bare, check=False)
        assert done.returncode == Exit.DONE
    (root / "vendor_overlay" / OVERLAY.targets[0]).unlink()
    arguments = ["revert", "--site", str(target)]
    assert subprocess.run([*command, *arguments], env=bare, check=False).returncode == Exit.DONE
    assert snapshot(target) == before
    arguments = ["apply", "--site", str(target)]
    assert subprocess.run([*command, *arguments], env=bare, check=False).returncode == Exit.DONE


def test_dist_needs_a_checkout(checkout: Path, site: Path) -> None:
    refused = series("dist", "--site", site, root=checkout)
    assert refused.returncode == Exit.USAGE
    assert "not a git checkout" in refused.stderr


def test_an_upstream_that_is_foreign_is_refused(tmp_path: Path) -> None:
    site = sites.small(tmp_path / "site")
    (site / OVERLAY.targets[0]).write_text("mine\n")
    with pytest.raises(OverlayError) as caught:
        from_installation(locate(site=str(site)), OVERLAY)
    assert caught.value.code is Exit.FOREIGN


def test_patches_and_pin_must_name_the_same_files(tmp_path: Path) -> None:
    overlay = mini.overlay(tmp_path / "overlay")
    pin = overlay.root / "VERSION_PIN"
    gone = [line for line in pin.read_text().splitlines() if not line.endswith("vllm/one.py")]
    pin.write_text("\n".join(gone) + "\n")
    with pytest.raises(OverlayError, match=r"disagree on vllm/one\.py"):
        Overlay.load(overlay.root)
