"""Real releases, whole. The wheels are downloaded once into build/wheels/releases."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from overlay import pin
from overlay.patches import Series
from overlay.pin import sha256
from review import model, review, words
from review.index import STATED
from review.review import Review
from review.runners import VARIABLE
from review.wheels import Release
from series import errata
from support import releases
from support.cherry_pick import assert_same_as_git
from support.releases import pinned
from support.sites import OVERLAY, REPO

pytestmark = pytest.mark.slow

Real = tuple[Release, Review, Path]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Real]:
    """Reviews of real releases, each made once: the release, the review, and its folder."""
    folder = tmp_path_factory.mktemp("reviews")

    @cache
    def reviewed(version: str) -> Real:
        wheel = releases.release(version)
        result = review.of_release(OVERLAY, pinned(), wheel, folder)
        return wheel, result, folder / wheel.version

    return reviewed


@pytest.fixture(params=["0.22.1", "0.23.0", "0.33.0"])
def real(request: pytest.FixtureRequest, reviews: Callable[[str], Real]) -> Real:
    return reviews(request.param)


def test_verdicts_are_those_of_git(real: Real, tmp_path: Path) -> None:
    wheel, result, _ = real
    before, after = (
        {path: up.read(path) if path in up.paths else b"" for path in OVERLAY.targets}
        for up in (pinned(), wheel.upstream)
    )
    assert_same_as_git(tmp_path / "tree", OVERLAY.series, before, after, result.merged)


def test_the_candidate_applies_to_the_release(real: Real, tmp_path: Path) -> None:
    wheel, result, folder = real
    candidate = folder / review.CANDIDATE
    listed = (candidate / "patches" / "series").read_text().split()
    for name in listed:
        file = candidate / "patches" / name
        file = file if file.exists() else file.with_name(f"{name}.incomplete")
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "series").write_text("".join(f"{name}\n" for name in listed))
    patches = Series.load(tmp_path)
    vendored = candidate / "vendor_overlay"
    paths = {file.relative_to(vendored).as_posix() for file in vendored.rglob("*.py")}
    assert paths | result.merged.conflicts == set(OVERLAY.targets)
    for path in paths:
        overlaid = patches.apply(path, wheel.upstream.read(path))
        assert overlaid == (vendored / path).read_bytes()
        assert patches.reverse(path, overlaid) == wheel.upstream.read(path)
    assert (candidate / pin.NAME).exists() is result.candidate.ready


def test_a_release_with_the_same_files_is_unchanged(reviews: Callable[[str], Real]) -> None:
    wheel, result, folder = reviews("0.22.1")
    file = releases.FOLDER / wheel.wheel
    assert (wheel.version, wheel.proof) == ("0.22.1", STATED)
    assert wheel.sha256 == sha256(file.read_bytes())
    assert result.verdict == review.UNCHANGED
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    assert {word.state for word in result.words} == {words.LIVES}
    assert (result.changes, result.decisions) == ([], [])
    candidate = folder / review.CANDIDATE
    for file in (REPO / "patches").glob("*.patch"):
        assert (candidate / "patches" / file.name).read_bytes() == file.read_bytes()
    new = pin.loads((candidate / pin.NAME).read_text())
    assert new.release == "0.22.1"
    assert (new.upstream, new.result) == (OVERLAY.pin.upstream, OVERLAY.pin.result)


def test_the_next_release_is_as_the_documents_walk_through_it(
    reviews: Callable[[str], Real],
) -> None:
    _, result, folder = reviews("0.23.0")
    assert result.verdict == review.CONFLICT
    text = " ".join((REPO / "docs" / "releases.md").read_text().split())
    numbers = [judged.number for judged in result.conflicts]
    assert f"that {' and '.join(numbers)} conflict" in text
    assert f"VLLM_READINESS={words.switch(result.words)}" in text
    assert f"{sum(e.kind in model.DECIDE for e in result.changes)} definitions" in text
    changed = {change.name: change for change in result.changes}
    # Three matter: wide noise, top-k and top-p through FlashInfer, and the metadata of GDN.
    sampling = "vllm.v1.sample."
    for name in (
        f"{sampling}rejection_sampler.sample_recovered_tokens",
        f"{sampling}ops.topk_topp_sampler.random_sample",
        "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.build",
    ):
        assert changed[name].kind in model.DECIDE
        assert changed[name].diff
    assert changed["vllm.v1.worker.cpu.shm"].kind == model.MAKER
    states = {word.name: word.state for word in result.words}
    lost = {name for name, state in states.items() if state == words.CONFLICT}
    assert lost == {"sampler-copies", "cpu-seeds", "mamba-blocks", words.FRAME}
    assert states["thinking-unlimited"] == words.MENDED
    assert result.runners.changed
    assert any("LlamaForCausalLM" in line for line in result.runners.diff if line[0] == "+")
    assert "clean" not in (folder / review.MARKDOWN).read_text().partition("## ")[0]


def test_the_decision_is_shown_with_the_variable_that_overrides_it(
    reviews: Callable[[str], Real],
) -> None:
    _, result, folder = reviews("0.33.0")
    report = (folder / review.MARKDOWN).read_text().replace("\\", "")
    assert result.runners.after is not None
    assert result.runners.after.text in report
    assert f"`{VARIABLE}=0` selects V1" in report
    assert not result.runners.without_v1


def test_the_newest_release_that_was_read_says_which_fixes_can_go(
    reviews: Callable[[str], Real],
) -> None:
    facts = errata.load(REPO)
    _, result, _ = reviews(facts["read"])
    fixes: dict[str, list[dict[str, Any]]] = {}
    for erratum in facts["errata"].values():
        fixes.setdefault(erratum["word"], []).append(erratum)
    for fix in result.mends.values():
        mended = ["mended" in erratum for erratum in fixes[fix.name]]
        some = any(mended) or any("partly" in erratum for erratum in fixes[fix.name])
        assert fix.state == (
            words.MENDED if all(mended) else words.PARTLY if some else words.NOT_MENDED
        )
    assert any(each.startswith("the fix allowed-tokens is mended") for each in result.decisions)
