"""The table that justifies every patch, made from the real series."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from overlay.patches import header_fields
from overlay.source import Overlay
from review import waiver
from review.words import Vocabulary
from support.sites import OVERLAY, REPO, UPSTREAM, run
from support.tables import rows

VOCABULARY = Vocabulary(REPO / "vendor_overlay")


def test_each_patch_has_its_reason_link_and_removal_plan() -> None:
    text = waiver.markdown(OVERLAY, VOCABULARY, None)
    changed, added = len(OVERLAY.targets), len(OVERLAY.added)
    assert f"{OVERLAY.pin.overlay} changes {changed} files of vLLM" in text
    assert f", and adds {added} files of its own. " in text
    # The same counts, in the same words, and their sum.
    command = ["status", "--site", UPSTREAM]
    whole = f"{changed + added} files ({changed} of vLLM's, {added} of the overlay's): "
    assert whole in run(*command).stdout
    table = rows(text)
    assert len(table) == len(OVERLAY.series.patches)
    for row, patch in zip(table, OVERLAY.series.patches, strict=True):
        name, reason, words, files, link, removed = row
        fields = header_fields(patch.header)
        assert name.startswith(patch.name[:4])
        assert min(map(len, (reason, words, link, removed))) > 5
        if len(patch.files) < len(OVERLAY.targets):
            assert files.count("`vllm/") == len(patch.files)
        bug = fields["Bug"]
        assert (bug in link) == (bug != "none")
        # A backslash keeps Markdown from taking a character for markup.
        assert removed.replace("\\", "") == " ".join(fields["Drop-When"].split())


def test_every_changed_file_is_named_by_a_patch_that_has_a_reason_for_it() -> None:
    """Not by the one that marks all of them as changed."""
    first, *others = rows(waiver.markdown(OVERLAY, VOCABULARY, None))
    assert first[3] == f"all {len(OVERLAY.targets)}, which the other rows name"
    named = {path for row in others for path in re.findall("`(vllm/.*?)`", row[3])}
    assert sorted(named) == OVERLAY.targets


def test_features_and_fixes_are_told_apart() -> None:
    by_number = {row[0][:4]: row[2] for row in rows(waiver.markdown(OVERLAY, VOCABULARY, None))}
    assert by_number["0001"] == by_number["0003"] == by_number["0012"] == waiver.FRAME
    assert by_number["0015"] == "fixes `recovered-tokens`"
    assert by_number["0037"] == "features `block-tables`"
    assert re.fullmatch("features .*; fixes .*", by_number["0004"])


def test_a_review_adds_a_verdict_for_each_patch() -> None:
    """And says of which patches the release has the fix."""
    judged = [
        SimpleNamespace(
            patch=patch,
            number=patch.name[:4],
            verdict="moved" if place else "conflicts",
            because=f"by {place} | lines",
        )
        for place, patch in enumerate(OVERLAY.series.patches)
    ]
    mends = {
        word: SimpleNamespace(
            name=word, state=state, because="since 0.98.0", todo="drop it", patches=judged[-1:]
        )
        for word, state in (("seeds", "mended"), ("other", "not mended"))
    }
    review = SimpleNamespace(
        release=SimpleNamespace(version="0.99.0"),
        date="2026-11-22",
        merged=SimpleNamespace(patches=judged),
        mends=mends,
    )
    text = waiver.markdown(OVERLAY, VOCABULARY, cast("Any", review))
    assert "on vLLM 0.99.0 |" in text
    assert "RELEASE=0.99.0`, 2026-11-22): 0 applies" in text
    assert f"{len(judged) - 1} moved (at other lines), 1 conflicts (a person" in text
    *cells, last = (row[-1] for row in rows(text))
    assert cells == [
        f"{each.verdict}: by {place} \\| lines" for place, each in enumerate(judged[:-1])
    ]
    assert last.endswith(" \\| lines; `seeds` is mended (since 0.98.0): drop it")


def test_the_program_prints_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "review", "waiver", "--site", str(UPSTREAM)]
    environment = {"PYTHONPATH": str(REPO / "scripts"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stderr == ""
    assert len(rows(done.stdout)) == len(Overlay.load(REPO).series.patches)
