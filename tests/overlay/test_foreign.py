"""What is told of a file that somebody else has changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from overlay import cli, foreign
from overlay.errors import Exit
from overlay.patches import FilePatch, composed
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
    hunks = tuple(composed(OVERLAY.series, path))
    assert FilePatch(path, hunks).apply(data, "all") == OVERLAY.overlaid_bytes(path, data)
    assert not list(foreign._marks(data))


def test_a_patcher_is_named_and_our_patches_may_merge(site: Path, capsys: Any) -> None:
    file = site / RUNNER
    file.write_bytes(b"# Patched by another program\n" + file.read_bytes())
    before = snapshot(site)
    text = known(site, RUNNER, capsys)
    assert "line 1 says: # Patched by another program" in text
    assert "no package's RECORD lists these bytes" in text
    assert "patches may merge" in text
    assert cli.main(["apply", "--site", str(site)]) == Exit.FOREIGN
    assert snapshot(site) == before


def test_patches_whose_lines_have_changed_cannot_be_merged(site: Path, capsys: Any) -> None:
    file = site / SCHEDULER
    hunk = next(h for h in composed(OVERLAY.series, SCHEDULER) if h.old)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[hunk.old_at] = b"        changed()\n"
    file.write_bytes(b"".join(lines))
    text = known(site, SCHEDULER, capsys)
    assert f"cannot be merged: it lacks upstream's lines {hunk.old_at + 1}, which" in text


@pytest.mark.parametrize("path", [SCHEDULER, RUNNER])
def test_an_edit_of_an_overlaid_file_is_told_from_one_of_upstream_s(
    site: Path, capsys: Any, path: str
) -> None:
    assert cli.main(["apply", "--site", str(site), "--force"]) == Exit.DONE
    ours = [h for h in composed(OVERLAY.series, path) if h.old and h.new]
    lines = (site / path).read_bytes().splitlines(keepends=True)
    # A long one, because a single line may occur elsewhere, too.
    lines[max(ours, key=lambda hunk: len(hunk.new)).new_at] = b"X = 1  # mine\n"
    (site / path).write_bytes(b"".join(lines))
    text = known(site, path, capsys)
    assert f"{len(ours) - 1} of the overlay's {len(ours)} replacements of lines are in it" in text
    assert "merge" not in text


def test_a_file_that_no_patch_changes_is_not_even_read(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / UNTOUCHED).parent.mkdir(parents=True, exist_ok=True)
    (site / UNTOUCHED).mkdir()  # Reading it would fail.
    assert cli.main(["apply", "--site", str(site), "--force"]) == Exit.DONE
    assert cli.main(["verify", "--site", str(site)]) == Exit.DONE
    assert cli.main(["revert", "--site", str(site), "--force"]) == Exit.DONE
