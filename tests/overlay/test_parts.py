"""`apply` of a part of the overlay: what is left out, and files that are left to others."""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlay import cli, merge, words
from overlay.errors import Exit
from overlay.install import exclusive, lay_over
from overlay.installation import locate
from overlay.parts import derive
from overlay.patches import FilePatch, Hunk, Series
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from overlay.state import inspect
from support import mini
from support.examples import draws
from support.sites import OVERLAY, UPSTREAM, run, snapshot, status
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity, switch

#: A file that real patches change, and the words that do.
PROCESSOR = "vllm/v1/engine/output_processor.py"
PROCESSOR_WORDS = {
    *("aborted-parents", "cached-prompt-logprobs", "logprobs"),
    *("process-outputs", "request-times", "sessions", "stop-strings"),
}

#: Files of the synthetic overlay: every word needs the first.
FRAME, THEIRS, THREE = "vllm/one.py", "vllm/v1/two.py", "vllm/v1/sub/three.py"
SERVES = {FRAME: "all", THEIRS: "logprobs, stop-strings", THREE: "history, penalties"}
MARK = b"# Changed by vllm-readiness-overlay.\n"
PRISTINE = {**mini.PRISTINE, THREE: b"X = 1\n"}
OVERLAID = {path: MARK + data for path, data in {**mini.OVERLAID, THREE: b"X = 2\n"}.items()}
#: What is left out with each, with what needs it.
THEIR_WORDS = {"logprobs", "stop-strings"}
THREE_WORDS = {"bad-words", "history", "penalties", "thinking-budget"}
LEAVE, LEAVE_THREE = f"--leave={THEIRS}", f"--leave={THREE}"
PROVENANCE = f"{PACKAGE}/provenance"


@pytest.fixture
def parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    """A synthetic overlay with two files that can be left, which the command line lays."""
    overlay = mini.worded(tmp_path / "parted", PRISTINE, OVERLAID, SERVES)
    monkeypatch.setattr(cli, "ROOT", overlay.root)
    return overlay


@pytest.fixture
def site(tmp_path: Path, parted: Overlay) -> Path:
    """The synthetic installation with the third file."""
    return mini.install(tmp_path / "site", PRISTINE)


def upstream(paths: Iterable[str]) -> dict[str, bytes]:
    return {path: (UPSTREAM / path).read_bytes() for path in paths}


def part(without: Collection[str]) -> Overlay:
    return derive(OVERLAY, words.closed(OVERLAY, without), [], upstream)


@cache
def merged(path: str, kept: frozenset[str]) -> bytes:
    """A file with these patches alone."""
    data = (UPSTREAM / path).read_bytes()
    return merge.part(OVERLAY.series, kept, [path], lambda _: data).apply(path, data)


def files_without(without: Collection[str]) -> dict[str, bytes]:
    """The files of a part, each merged once however many words have no patch in it."""
    gone = registry.ALL - registry.without(without, registry.ALL)
    stay = [patch for patch in OVERLAY.series.patches if words.stays(patch, gone)]
    files = {}
    for path in OVERLAY.targets:
        kept = {p.name: words.is_mark(f) for p in stay for f in p.files if f.path == path}
        if not all(kept.values()):
            files[path] = merged(path, frozenset(kept))
    return files


@draws(8)
@given(st.sets(st.sampled_from(sorted(registry.ALL)), min_size=1))
def test_any_words_give_an_overlay_that_can_be_taken_off(without: set[str]) -> None:
    overlay = part(without)
    before = upstream(overlay.targets)
    after = {path: overlay.overlaid_bytes(path, data) for path, data in before.items()}
    assert after == files_without(without)
    for path, data in after.items():
        ast.parse(data)
        assert overlay.pristine_bytes(path, data) == before[path]
    laid = {patch.name: patch for patch in overlay.series.patches}
    for patch in OVERLAY.series.patches:
        served = words.served(patch)
        gone = served is not None and served <= words.closed(OVERLAY, without)
        assert (patch.name in laid) is not gone
    assert overlay.pin.without == tuple(sorted(words.closed(OVERLAY, without)))


def undefined(folder: Path) -> dict[str, set[str]]:
    """The names that a module of a tree uses and nothing in it defines, by the module."""
    options = ["check", "--isolated", "--select=F821", "--output-format=json", "--no-cache"]
    done = subprocess.run(
        [Path(sys.executable).parent / "ruff", *options, folder], capture_output=True, check=False
    )
    names: dict[str, set[str]] = {}
    for each in json.loads(done.stdout):
        names.setdefault(str(Path(each["filename"]).relative_to(folder)), set()).add(
            each["message"]
        )
    return names


def test_no_patch_uses_a_name_of_one_that_does_not_serve_the_same(tmp_path: Path) -> None:
    """Each word alone, and all but each; a header that forgets a word leaves a name undefined."""
    cases = {"stock": upstream(OVERLAY.targets)}
    for name in sorted(registry.ALL):
        cases[f"-{name}"] = files_without([name])
        cases[name] = files_without(registry.ALL - registry.with_needs([name]))
    seen = set()
    for case, files in cases.items():
        for path, data in files.items():
            if (path, data) not in seen:  # Most words have no patch in most files.
                seen.add((path, data))
                file = tmp_path / case / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    assert len(seen) > 100
    names = undefined(tmp_path)
    for module, messages in names.items():
        path = module.partition("/")[2]
        assert messages <= names.get(f"stock/{path}", set()), module


def test_the_words_of_the_patches_are_those_of_the_runtime() -> None:
    served = [words.served(patch) for patch in OVERLAY.series.patches]
    assert frozenset().union(*(each for each in served if each)) == registry.ALL
    assert None in served


@pytest.mark.parametrize(
    ("old", "new", "mark"),
    [
        ([], [b"# a\n", b"# b\n"], True),
        ([], [b"# a\n", b"b\n"], False),
        ([b"a\n"], [b"# a\n"], False),
    ],
)
def test_a_mark_is_nothing_but_comments(old: list[bytes], new: list[bytes], mark: bool) -> None:
    file = FilePatch(FRAME, (Hunk(1, tuple(old), 1, tuple(new)),))
    assert words.is_mark(file) is mark


def test_a_file_is_left_with_every_word_that_changes_it(real: Path) -> None:
    """The runtime treats a left-out part of the real patches as switched off."""
    site, left_out = real, PROCESSOR_WORDS | {"closed-grammars"}
    assert words.words_of(OVERLAY, PROCESSOR) == frozenset(PROCESSOR_WORDS)
    options = ["--leave", PROCESSOR, "--leave=vllm/v1/core/sched/utils.py"]
    assert run("apply", "--site", site, *options).returncode == Exit.DONE
    report = status(site)
    assert (report["state"], set(report["left_out"])) == ("overlaid", set(left_out))
    shown = run("status", "--site", site).stdout.splitlines()
    assert f"left out: {', '.join(sorted(left_out))}" in shown
    verified = run("verify", "--site", site)
    assert (verified.returncode, verified.stdout, verified.stderr) == (Exit.DONE, "", "")
    # What an engine there would say of itself.
    provenance = site / PROVENANCE
    assert identity.left_out(provenance) == left_out
    assert identity.digest(provenance, site) == report["digest"]
    value = switch.parse("-" + ",-".join(left_out))
    assert registry.without(identity.left_out(provenance), registry.ALL) == value


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--leave=vllm/logger.py"], ["vllm/logger.py: is not a file that the overlay changes"]),
        ([f"--leave={FRAME}"], [f"{FRAME}: cannot be left unchanged: every feature and fix"]),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(site: Path, options: list[str], parts: list[str]) -> None:
    before = snapshot(site)
    for command in ("apply", "verify", "status", "doctor"):
        refused = run(command, "--site", site, *options, code=Exit.USAGE)
        for text in parts:
            assert text in refused.stderr + refused.stdout
    assert snapshot(site) == before


def test_a_file_of_somebody_else_s_is_left_alone(site: Path) -> None:
    stock = snapshot(site)
    mine = (site / THEIRS).read_bytes() + b"# mine\n"
    (site / THEIRS).write_bytes(mine)
    before = snapshot(site)
    refused = run("apply", "--site", site, code=Exit.FOREIGN)
    option = [f"--leave={THEIRS}"]
    left = f"or leave this file to the other program: add --leave={THEIRS}"
    assert left in refused.stderr
    assert left in run("status", "--site", site).stdout
    assert run("apply", "--site", site, *option).returncode == Exit.DONE
    assert (site / THEIRS).read_bytes() == mine
    report = status(site)
    assert (report["state"], report["code"]) == ("overlaid", Exit.DONE)
    assert THEIRS not in {file["path"] for file in report["files"]}
    assert THEIRS not in (site / PROVENANCE / "VERSION_PIN").read_text()
    for command in (["verify"], ["diff"], ["exec", "--dry-run", "--", "true"]):
        assert run(command[0], "--site", site, *command[1:]).returncode == Exit.DONE
    again = run("apply", "--site", site, *option)
    assert "nothing to do: already overlaid" in again.stdout
    assert f"note: left out: {', '.join(sorted(THEIR_WORDS))}" in again.stdout
    whole = run("apply", "--site", site, code=Exit.FOREIGN)
    assert left in whole.stderr
    assert left in run("doctor", "--site", site, code=Exit.FOREIGN).stdout
    assert "has nothing to do" in run("doctor", "--site", site, *option).stdout
    overlaid = snapshot(site)
    # The edit goes first, or the overlay.
    (site / THEIRS).write_bytes(PRISTINE[THEIRS])
    assert run("verify", "--site", site).returncode == Exit.DONE
    assert run("revert", "--site", site).returncode == Exit.DONE
    assert snapshot(site) == stock
    (site / THEIRS).write_bytes(mine)
    assert run("apply", "--site", site, *option).returncode == Exit.DONE
    assert snapshot(site) == overlaid
    done = run("revert", "--site", site, code=Exit.DONE)
    assert ", pristine\n" in done.stdout
    assert snapshot(site) == before


def test_several_files_of_somebody_else_s_are_left_by_one_command(site: Path) -> None:
    paths = [THEIRS, THREE]
    for path in paths:
        (site / path).write_text("# mine\n")
    (advice,) = re.findall(
        r"leave this file to the other program: add (.+)", run("apply", "--site", site).stderr
    )
    assert run("apply", "--site", site, *advice.split()).returncode == Exit.DONE
    assert {(site / path).read_text() for path in paths} == {"# mine\n"}
    (site / FRAME).write_text("# mine\n")
    refused = run("verify", "--site", site).stderr
    assert FRAME in refused
    assert "--leave=" not in refused, "a part of the frame cannot be left out"


@pytest.mark.parametrize("whose", ["ours", "ours, without a record", "upstream's"])
def test_a_file_that_is_to_hold_lines_of_ours_is_not_left(site: Path, whose: str) -> None:
    """Somebody has edited the overlaid file, or put upstream's back and edited that."""
    stock = (site / THEIRS).read_bytes()
    run("apply", "--site", site)
    before = stock if whose == "upstream's" else (site / THEIRS).read_bytes()
    (site / THEIRS).write_bytes(before + b"# mine\n")
    if whose == "ours, without a record":
        shutil.rmtree(site / PACKAGE)
        assert "--leave=" not in run("apply", "--site", site).stderr
        return
    for command in (["verify"], ["apply", LEAVE]):
        refused = run(*command, "--site", site, code=Exit.FOREIGN)
        assert "--leave=" not in refused.stderr


def test_parts_and_the_whole_replace_one_another(site: Path, tmp_path: Path) -> None:
    choices = [[LEAVE], [], [LEAVE_THREE, LEAVE]]
    for number, options in enumerate(choices):
        fresh = mini.install(tmp_path / str(number), PRISTINE)
        run("apply", "--site", fresh, *options)
        done = run("apply", "--site", site, *options, code=Exit.DONE)
        assert ("note: replaces overlay" in done.stdout) is bool(number)
        assert "another state" not in done.stdout
        assert snapshot(site) == snapshot(fresh)
        digests = {status(s)["digest"] for s in (site, fresh)}
        assert len(digests) == 1
    assert "without" not in run("status", "--site", site).stdout


def test_another_part_than_the_one_that_is_asked_for_is_reported(
    site: Path, parted: Overlay
) -> None:
    run("apply", "--site", site, LEAVE)
    assert run("verify", "--site", site, LEAVE).returncode == Exit.DONE
    other = run("verify", "--site", site, LEAVE_THREE, code=Exit.FOREIGN)
    assert "is overlaid by overlay" in other.stderr
    without = f"{parted.pin.overlay} without {', '.join(sorted(THEIR_WORDS))}"
    assert f"{without}; this is" in other.stderr
    shown = run("doctor", "--site", site, LEAVE_THREE).stdout
    without = f"{parted.pin.overlay} without {', '.join(sorted(THREE_WORDS))}"
    assert f"overlay {without} would change " in shown


def test_what_a_run_left_beside_a_file_that_is_left_out_is_removed(site: Path) -> None:
    left = site / "vllm/v1/sub/.readiness-overlay-three.py"
    left.write_text("")
    assert run("verify", "--site", site).returncode == Exit.PARTIAL
    assert run("apply", "--site", site, LEAVE_THREE).returncode == Exit.DONE
    assert not left.exists()
    left.write_text("")
    partial = run("verify", "--site", site, code=Exit.PARTIAL)
    assert f" apply --site={site}` with its --leave or --extra completes it" in partial.stderr
    assert run("revert", "--site", site).returncode == Exit.DONE
    assert not left.exists()


def in_the_pin(old: str, new: str) -> Callable[[Path], None]:
    def tamper(site: Path) -> None:
        pin = site / PROVENANCE / "VERSION_PIN"
        text = pin.read_text()
        assert old in text
        pin.write_text(text.replace(old, new, 1))

    return tamper


def another_checksum(site: Path) -> None:
    """A file of ours with other contents, and a record that agrees with them."""
    pin, path = site / PROVENANCE / "VERSION_PIN", f"{PACKAGE}/a.py"
    (site / path).write_bytes(b"import evil\n")
    pin.write_text(pin.read_text().replace(sha256(mini.OURS[path]), sha256(b"import evil\n")))


def another_patch(site: Path) -> None:
    """A patch of ours with another result, a record of it, and that result."""
    pin = site / PROVENANCE / "VERSION_PIN"
    text = pin.read_text()
    file = site / PROVENANCE / "patches" / "0003-three.py.patch"
    old, target = file.read_bytes(), site / THREE
    before = target.read_bytes()
    new = old.replace(b"+X = 2\n", b"+X = 3\n")
    assert new != old
    file.write_bytes(new)
    after = Series.load(site / PROVENANCE / "patches").apply(THREE, PRISTINE[THREE])
    target.write_bytes(after)
    for a, b in ((old, new), (before, after)):
        text = text.replace(sha256(a), sha256(b))
    pin.write_text(text)


def record(left_out: Collection[str]) -> str:
    """The line of the record with what is left out."""
    return f"without = {','.join(sorted(left_out))}\n"


TAMPERS = {
    "other words": in_the_pin(*map(record, (THEIR_WORDS, THEIR_WORDS | THREE_WORDS))),
    "no word of ours": in_the_pin(",stop-strings\n", ",stop-strings,nonsense\n"),
    "a word without its dependents": in_the_pin("without = ", "without = history,"),
    "another checksum": another_checksum,
    "another patch": another_patch,
}


@pytest.mark.parametrize("tamper", TAMPERS.values(), ids=TAMPERS)
def test_a_record_of_a_part_is_not_believed(site: Path, tamper: Callable[[Path], None]) -> None:
    run("apply", "--site", site, LEAVE)
    tamper(site)
    run("verify", "--site", site, code=Exit.FOREIGN)
    assert run("exec", "--site", site, "--", "true").returncode == Exit.FOREIGN


def test_a_part_that_keeps_what_needs_the_rest_is_not_believed(site: Path, parted: Overlay) -> None:
    """Only a run of another program lays it."""
    laid = derive(parted, {"history"}, [], lambda paths: {p: PRISTINE[p] for p in paths})
    with exclusive(site, 0) as lock:
        lay_over(inspect(locate(site=str(site)), laid), lock)
    assert run("verify", "--site", site).returncode == Exit.FOREIGN
