"""Real releases, whole. The wheels are downloaded once into build/wheels/releases."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from overlay import pin
from overlay.patches import Series
from overlay.pin import sha256
from review import review, verdict, watch, words
from review.runners import VARIABLE
from review.verdict import Review
from review.wheels import STATED, Release
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


@pytest.mark.parametrize("version", ["0.22.1", "0.23.0", "0.33.0"])
def test_verdicts_are_those_of_git(
    version: str, reviews: Callable[[str], Real], tmp_path: Path
) -> None:
    wheel, result, _ = reviews(version)
    before, after = (
        {path: up.read(path) if path in up.paths else b"" for path in OVERLAY.targets}
        for up in (pinned(), wheel.upstream)
    )
    assert_same_as_git(tmp_path / "tree", OVERLAY.series, before, after, result.merged)


def test_a_release_with_the_same_files_is_unchanged(reviews: Callable[[str], Real]) -> None:
    wheel, result, folder = reviews("0.22.1")
    file = releases.FOLDER / wheel.wheel
    assert (wheel.version, wheel.proof) == ("0.22.1", STATED)
    assert wheel.sha256 == sha256(file.read_bytes())
    assert {"vllm-0.22.1.tar.gz", wheel.wheel} <= wheel.archives.keys()
    assert result.verdict == verdict.UNCHANGED
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    assert {word.state for word in result.words} == {words.LIVES}
    assert (result.changes, result.decisions) == ([], [])
    candidate = folder / review.CANDIDATE
    for file in (REPO / "patches").glob("*.patch"):
        assert (candidate / "patches" / file.name).read_bytes() == file.read_bytes()
    new = pin.loads((candidate / pin.NAME).read_text())
    assert new.release == "0.22.1"
    assert (new.upstream, new.result) == (OVERLAY.pin.upstream, OVERLAY.pin.result)
    for path, digest in new.result.items():
        if path in new.upstream:
            data = Series.load(candidate / "patches").apply(path, wheel.upstream.read(path))
            assert sha256(data) == digest


def test_the_next_release_is_as_the_documents_walk_through_it(
    reviews: Callable[[str], Real],
) -> None:
    _, result, folder = reviews("0.23.0")
    assert result.verdict == verdict.CONFLICT
    text = " ".join((REPO / "docs" / "releases.md").read_text().split())
    numbers = [judged.number for judged in result.conflicts]
    assert f"that {' and '.join(numbers)} conflict" in text
    assert f"VLLM_READINESS={words.switch(result.words)}" in text
    assert f"{sum(e.kind in watch.DECIDE for e in result.changes)} definitions" in text
    changed = {change.name: change for change in result.changes}
    # Three matter: wide noise, top-k and top-p through FlashInfer, and the metadata of GDN.
    sampling = "vllm.v1.sample."
    for name in (
        f"{sampling}rejection_sampler.sample_recovered_tokens",
        f"{sampling}ops.topk_topp_sampler.random_sample",
        "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params",
        "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.build",
    ):
        assert changed[name].kind in watch.DECIDE
        assert changed[name].diff
    states = {word.name: word.state for word in result.words}
    lost = {name for name, state in states.items() if state == words.CONFLICT}
    assert lost == {"sampler-copies", "cpu-seeds", "mamba-blocks"}
    assert states["thinking-unlimited"] == words.MENDED
    (_, before), (_, after) = result.runners
    assert '"LlamaForCausalLM"' in "".join(after)
    assert before != after
    report = (folder / review.MARKDOWN).read_text().replace("\\", "")
    assert all(part in report for part in after)
    assert f"`{VARIABLE}=0` selects V1" in report


def test_the_newest_release_that_was_read_says_which_fixes_can_go(
    reviews: Callable[[str], Real],
) -> None:
    facts = errata.load(REPO)
    _, result, _ = reviews(facts["read"])
    assert any(each.startswith("the fix allowed-tokens is mended") for each in result.decisions)
