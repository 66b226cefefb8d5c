"""What is told of a file that somebody else has changed."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from overlay import cli, foreign
from overlay.errors import Exit
from overlay.patches import FilePatch
from support.sites import OVERLAY, UPSTREAM, snapshot

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
UNTOUCHED = "vllm/v1/worker/mamba_utils.py"


def known(site: Path, path: str, capsys: Any) -> str:
    capsys.readouterr()
    assert cli.main(["status", "--json", "--site", str(site)]) == Exit.FOREIGN
    (file,) = [f for f in json.loads(capsys.readouterr().out)["files"] if f["path"] == path]
    return "\n".join(file["known"])


@pytest.mark.parametrize("path", OVERLAY.targets)
def test_the_hunks_against_upstream_are_known_without_its_bytes(path: str) -> None:
    data = (UPSTREAM / path).read_bytes()
    hunks = tuple(foreign.composed(OVERLAY.series, path))
    assert FilePatch(path, hunks).apply(data, "all") == OVERLAY.overlaid_bytes(path, data)
    assert all(place.shift == 0 for place in foreign.places(OVERLAY.series, path, data))
    assert not list(foreign._marks(data))


def test_a_patcher_is_named_and_our_hunks_would_merge(site: Path, capsys: Any) -> None:
    file, hunks = site / RUNNER, foreign.composed(OVERLAY.series, RUNNER)
    # Two hunks in a row that are found by their lines: what is in between moves no other's place.
    before, after = next(
        (a, b) for a, b in pairwise(hunks) if a.old and b.old and b.old_at > a.old_at + len(a.old)
    )
    lines = file.read_bytes().splitlines(keepends=True)
    lines[after.old_at : after.old_at] = [b"# Patched by somebody's tool\n", b"X = 1\n"]
    file.write_bytes(b"".join(lines))
    bytes_before = snapshot(site)
    text = known(site, RUNNER, capsys)
    assert f"line {after.old_at + 1} says: # Patched by somebody's tool" in text
    end = before.old_at + len(before.old)
    assert f"2 lines more between upstream's lines {end + 1} and {after.old_at + 1}" in text
    assert "no package's RECORD lists these bytes" in text
    assert f"{len(hunks)} hunks would merge" in text
    assert cli.main(["apply", "--site", str(site)]) == Exit.FOREIGN
    assert snapshot(site) == bytes_before


def test_a_hunk_whose_lines_have_changed_would_not_merge(site: Path, capsys: Any) -> None:
    file = site / SCHEDULER
    hunk = next(h for h in foreign.composed(OVERLAY.series, SCHEDULER) if h.old)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[hunk.old_at] = b"        changed()\n"
    file.write_bytes(b"".join(lines))
    text = known(site, SCHEDULER, capsys)
    assert "would not merge: 1 of" in text
    assert f"at upstream's lines {hunk.old_at + 1}" in text


@pytest.mark.parametrize("path", [SCHEDULER, RUNNER])
def test_a_line_in_an_overlaid_file_is_told_from_the_overlay_s_own(
    site: Path, capsys: Any, path: str
) -> None:
    assert cli.main(["apply", "--site", str(site), "--force"]) == Exit.DONE
    hunks = [hunk.reversed() for hunk in foreign.composed(OVERLAY.series, path) if hunk.new]
    before, after = next((a, b) for a, b in pairwise(hunks) if b.old_at > a.old_at + len(a.old) + 1)
    overlaid = (site / path).read_bytes().splitlines(keepends=True)
    lines = overlaid[:]
    lines[after.old_at : after.old_at] = [b"X = 1  # mine\n"]
    (site / path).write_bytes(b"".join(lines))
    text = known(site, path, capsys)
    end = before.old_at + len(before.old)
    moved = f"1 line more between the overlaid file's lines {end + 1} and {after.old_at + 1}"
    assert moved in text
    assert f"all {len(hunks)} changes of the overlay are present" in text
    assert "upstream's line" not in text
    assert "would merge" not in text
    lines = overlaid[:]
    lines[after.old_at] = b"X = 1  # mine\n"
    (site / path).write_bytes(b"".join(lines))
    text = known(site, path, capsys)
    changed = f"{after.old_at + 1}-{after.old_at + len(after.old)}"
    assert f"the overlaid file's lines {changed}, which are the overlay's, have changed" in text
    assert "are there" not in text
    assert "upstream's line" not in text


def test_a_file_that_no_patch_changes_is_not_even_read(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / UNTOUCHED).parent.mkdir(parents=True, exist_ok=True)
    (site / UNTOUCHED).mkdir()  # Reading it would fail.
    assert cli.main(["apply", "--site", str(site), "--force"]) == Exit.DONE
    assert cli.main(["verify", "--site", str(site)]) == Exit.DONE
    assert cli.main(["revert", "--site", str(site), "--force"]) == Exit.DONE
