"""The table that justifies every patch, made from the real series."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from overlay.patches import header_fields
from overlay.source import Overlay
from review import waiver
from support.seams import seams, vocabulary
from support.sites import OVERLAY, REPO, UPSTREAM


def rows(text: str) -> list[list[str]]:
    """The cells of each row below the table's head; every row has as many."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    assert len({len(row) for row in cells}) == 1
    return cells[2:]


def test_each_patch_has_its_reason_link_and_removal_plan() -> None:
    text = waiver.markdown(OVERLAY, vocabulary(), seams(), None)
    assert f"{OVERLAY.pin.overlay} changes {len(OVERLAY.targets)} files" in text
    table = rows(text)
    assert len(table) == len(OVERLAY.series.patches)
    for row, patch in zip(table, OVERLAY.series.patches, strict=True):
        name, reason, words, files, link, removed = row
        fields = header_fields(patch.header)
        assert name.startswith(patch.name[:4])
        assert min(map(len, (reason, words, link, removed))) > 5
        assert files.count("`vllm/") == len(patch.files)
        bug = fields["Bug"]
        assert (bug in link) == (bug != "none")
        # A backslash keeps Markdown from taking a character for markup.
        assert removed.replace("\\", "") == " ".join(fields["Drop-When"].split())


def test_a_patch_names_the_features_and_fixes_that_its_lines_call() -> None:
    """What a part of the series is chosen by."""
    for patch in OVERLAY.series.patches:
        serves = header_fields(patch.header)["Serves"].replace("\n", " ")
        named = set() if serves == "all" else set(serves.split(", "))
        assert named == set(seams().of_patch(patch.name)), patch.name


def test_features_and_fixes_are_told_apart() -> None:
    by_number = {
        row[0][:4]: row[2] for row in rows(waiver.markdown(OVERLAY, vocabulary(), seams(), None))
    }
    assert by_number["0001"] == waiver.FRAME
    assert by_number["0015"] == "fixes `recovered-tokens`"
    assert by_number["0037"] == "features `block-tables`"
    assert re.fullmatch("features .*; fixes .*", by_number["0004"])


def test_a_review_adds_a_verdict_for_each_patch() -> None:
    patches = [
        {"name": patch.name, "verdict": "moved", "because": f"by {place} | lines"}
        for place, patch in enumerate(OVERLAY.series.patches)
    ]
    review: dict[str, Any] = {"release": {"version": "0.99.0"}, "date": "2026-11-22"}
    text = waiver.markdown(OVERLAY, vocabulary(), seams(), {**review, "patches": patches})
    assert "on vLLM 0.99.0 |" in text
    assert "RELEASE=0.99.0`, 2026-11-22" in text
    assert [row[-1] for row in rows(text)] == [
        f"moved: by {place} \\| lines" for place in range(len(patches))
    ]


def test_the_program_prints_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "review", "waiver", "--site", str(UPSTREAM)]
    environment = {"PYTHONPATH": str(REPO / "scripts"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    text = json.loads(done.stdout)["markdown"]
    assert done.stderr == ""
    assert len(rows(text)) == len(Overlay.load(REPO).series.patches)
    plain = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert plain.stdout == text
