"""The verdict on each feature and fix, and the words that our modules, seams and patches serve."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from review import merging, verdicts
from review.fixes import MENDS
from review.merging import JudgedPatch
from review.references import References
from review.selecting import OTHER
from review.verdicts import FRAME
from review.vocabulary import Vocabulary
from support.seams import base, overlaid, seams, vocabulary
from support.sites import OVERLAY, REPO
from vllm.v1.readiness import registry

Findings = dict[str, dict[str, Any]]


@cache
def patches() -> list[JudgedPatch]:
    """All patches on their own release, where each applies."""
    return merging.merge(OVERLAY.series, base(), base()).patches


def number(name: str) -> str:
    """The number of the patch whose name holds a text."""
    (patch,) = [p.name for p in OVERLAY.series.patches if name in p.name]
    return patch[:4]


def judged_as(verdict: str, name: str, function: str | None = None) -> list[JudgedPatch]:
    """The patches, with the hunks of one of them, in one function or all, judged otherwise."""
    whole = "obsolete" if verdict in ("gone", "adopted") else verdict

    def changed(patch: JudgedPatch) -> JudgedPatch:
        files = [
            replace(
                file,
                hunks=tuple(
                    replace(hunk, verdict=verdict) if function in (None, hunk.function) else hunk
                    for hunk in file.hunks
                ),
            )
            for file in patch.files
        ]
        return replace(patch, verdict=whole, files=tuple(files))

    wanted = number(name)
    return [changed(patch) if patch.patch.name[:4] == wanted else patch for patch in patches()]


def examine(**changes: Any) -> Findings:
    arguments: dict[str, Any] = {
        "vocabulary": vocabulary(),
        "seams": seams(),
        "patches": patches(),
        "names": (),
        "fixes": (),
    }
    return {f["name"]: f for f in verdicts.examine(**arguments | changes)}


def unlike(findings: Findings, verdict: str = "holds") -> set[str]:
    return {name for name, finding in findings.items() if finding["verdict"] != verdict}


# The words of our sources.


def test_every_word_is_found_in_the_sources_and_in_a_patch() -> None:
    assert vocabulary().features == registry.FEATURES.keys()
    assert vocabulary().fixes == registry.FIXES.keys()
    served = {word for patch in OVERLAY.series.patches for word in seams().of_patch(patch.name)}
    assert served == registry.ALL
    assert examine().keys() == {*registry.ALL, FRAME}
    folder = REPO / "vendor_overlay/vllm/v1/readiness"
    modules = [p.relative_to(folder).as_posix().replace("/", ".") for p in folder.rglob("*.py")]
    assert {word for name in modules for word in vocabulary().of_module(name)} == registry.ALL


def test_the_patches_of_a_fix_serve_it() -> None:
    """What is read from the sources fits the table of fixes, which people keep."""
    for fix, mend in MENDS.items():
        for title in mend.patches:
            (name,) = [p.name for p in OVERLAY.series.patches if p.name[5:] == f"{title}.patch"]
            assert fix in seams().of_patch(name)


def test_most_patches_serve_one_word() -> None:
    words = {p.name[:4]: seams().of_patch(p.name) for p in OVERLAY.series.patches}
    assert words[number("copy-logits-only")] == {"sampler-copies"}
    assert words[number("let-each-seed-count")] == {"cpu-seeds"}
    assert words[number("bring-outputs-to-the-host")] == {"readback"}
    assert words[number("send-the-masks")] == words[number("fill-the-masks")] == {"grammars"}
    assert words[number("send-positions-of-several")] == {"rope-positions"}
    assert words[number("mark-each-changed-file")] == set()
    assert words[number("environment-variables")] == set()
    assert words[number("install-the-probe")] == set()
    assert {"thinking-rows", "stop-tokens"} < words[number("attach-the-live-batch")]
    assert "logprobs" not in words[number("attach-the-live-batch")]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sample.sampler_copies", {"sampler-copies"}),
        ("inputs.slot_mappings", {"block-tables"}),
        ("inputs.undrafted_rows", {"undrafted-rows"}),
        ("sample.slots", {"penalties", "bad-words"}),
        ("kernels.penalties", {"penalties"}),
        ("frontend.token_texts", {"logprobs"}),
        ("sample.thinking_fixes", {"thinking-rows", "thinking-sections", "thinking-unlimited"}),
        ("vllm/v1/readiness/inputs/step_metadata.py", {"step-inputs"}),
        ("vllm.v1.readiness.core.grammar_masks", {"grammars"}),
        ("watch.probe.recorder", set()),
        ("engine.switch", set()),
    ],
)
def test_a_module_serves_its_words_or_its_users(module: str, words: set[str]) -> None:
    assert vocabulary().of_module(module) == words


#: Words with a seam outside V1's files that do nothing under V2. The first is a logits processor
#: of V1, which its seam in the scheduler follows; the second is for CPUs, on which no V2 runs; the
#: worker, which both have, calls the third for V1 alone.
NOT_ON_V2 = {"closed-grammars", "cpu-pinning", "warm-up"}


def test_only_model_runner_v1_runs_these() -> None:
    alive = verdicts.without_v1(seams(), References(base()), overlaid()) - NOT_ON_V2
    features = {"sampler-copies", "logprobs", "grammars", "schedule", "update-outputs"}
    assert registry.FEATURES.keys() & alive == features
    assert {"sessions", "preemption", "bad-requests"} < alive
    assert not {"row-state", "thinking-rows", "recovered-tokens"} & alive


def test_the_log_claims_under_model_runner_v2_what_has_a_seam_there() -> None:
    alive = verdicts.without_v1(seams(), References(base()), overlaid())
    assert alive >= NOT_ON_V2
    assert alive - NOT_ON_V2 == registry.ON_V2


# The verdicts.


def test_on_its_own_release_everything_holds() -> None:
    findings = examine()
    assert unlike(findings) == set()
    assert list(verdicts.warnings(findings.values())) == []
    assert verdicts.switch(findings.values()) is None
    assert list(verdicts.sentences(list(findings.values()))) == [
        "every feature and fix can be carried over"
    ]


def test_a_conflict_leaves_out_its_words_alone() -> None:
    findings = examine(patches=judged_as("conflicts", "copy-logits-only"))
    assert unlike(findings) == {"sampler-copies"}
    assert findings["sampler-copies"]["verdict"] == "cannot hold"
    assert findings["sampler-copies"]["conflicts"] == [f"conflict in {number('copy-logits-only')}"]
    assert verdicts.switch(findings.values()) == "-sampler-copies"
    (sentence,) = verdicts.sentences(list(findings.values()))
    assert sentence == "all but sampler-copies: VLLM_READINESS=-sampler-copies"


def test_a_conflict_of_one_hunk_leaves_out_the_words_of_its_patch() -> None:
    whole = judged_as("conflicts", "attach-the-live-batch")
    one = judged_as("conflicts", "attach-the-live-batch", "GPUModelRunner.sample_tokens")
    assert {"history", "readback", "penalties"} < unlike(examine(patches=one))
    assert unlike(examine(patches=one)) == unlike(examine(patches=whole))
    assert "logprobs" not in unlike(examine(patches=whole))


def test_what_builds_on_a_word_goes_with_it() -> None:
    findings = examine(
        patches=judged_as("conflicts", "settle-sampled", "GPUModelRunner._bookkeeping_sync")
    )
    assert {"history", "penalties", "bad-words", "thinking-budget"} < unlike(findings)
    assert "needs history" in findings["penalties"]["conflicts"]


def test_a_conflict_in_what_all_share_is_said_first() -> None:
    findings = examine(patches=judged_as("conflicts", "environment-variables"))
    assert unlike(findings) == {FRAME}
    first, second = verdicts.sentences(list(findings.values()))
    assert first == "resolve first, for every feature and fix: conflict in 0002"
    assert second == "every feature and fix can be carried over"
    assert len(list(verdicts.warnings(findings.values()))) == 1


@pytest.mark.parametrize("verdict", ["adopted", "gone"])
def test_an_obsolete_patch_needs_eyes(verdict: str) -> None:
    findings = examine(patches=judged_as(verdict, "drop-block-ids"))
    assert unlike(findings) == {"block-ids"}
    assert findings["block-ids"]["verdict"] == "needs eyes"
    assert findings["block-ids"]["because"] == [f"{number('drop-block-ids')} is obsolete"]


def test_a_fix_that_the_release_has_is_droppable_whatever_else() -> None:
    fix = {"name": "cpu-seeds", "has": "mended", "because": "since 0.24.0"}
    open_fix = {"name": "block-ids", "has": "not mended", "because": ""}
    conflicting = judged_as("conflicts", "let-each-seed-count")
    findings = examine(fixes=[fix, open_fix], patches=conflicting)
    assert unlike(findings) == {"cpu-seeds"}
    assert findings["cpu-seeds"]["verdict"] == "droppable"
    assert findings["cpu-seeds"]["because"] == ["the release has it since 0.24.0"]
    assert verdicts.switch(findings.values()) is None
    assert any("can be dropped: cpu-seeds" in s for s in verdicts.sentences([*findings.values()]))


def line_of(path: str, text: str) -> str:
    lines = overlaid()[path].decode().splitlines()
    return f"{path}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def our_line(module: str, text: str) -> str:
    path = f"vllm/v1/readiness/{module}.py"
    lines = (REPO / "vendor_overlay" / path).read_text().splitlines()
    return f"{path}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


RUNNER = "vllm/v1/worker/gpu_model_runner.py"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (our_line("sample/penalties", "class Penalties"), {"penalties"}),
        (our_line("live", "class LiveBatch"), {FRAME}),
        (our_line("inputs/empty_states", "class EmptyStates"), {"empty-states"}),
        (our_line("feature", "CacheConfig"), {FRAME}),
        (line_of(RUNNER, "force_uniform_decode=readiness.of") + " (seam)", {"uniform-decode"}),
        (line_of(RUNNER, "readiness.start") + " (seam)", {FRAME}),
    ],
)
def test_a_changed_name_needs_eyes_for_the_words_of_its_users(user: str, words: set[str]) -> None:
    name = {"name": "vllm.v1.thing.Thing", "fate": "body", "users": [user]}
    findings = examine(names=[name, {**name, "fate": "same"}])
    assert unlike(findings) == words
    assert {f["verdict"] for f in findings.values()} == {"holds", "needs eyes"}
    (reasons,) = {tuple(findings[word]["because"]) for word in words}
    assert reasons == ("v1.thing.Thing: body changed",)


@pytest.mark.parametrize(
    ("concern", "words"),
    [
        ("vllm/v1/readiness/sample/bad_words_torch.py", {"bad-words"}),
        ("vllm.v1.readiness.sample.logprob_tokens", {"logprob-tokens"}),
        ("sessions", {"sessions"}),
        ("rope-positions", {"rope-positions"}),
        (line_of("vllm/v1/core/sched/utils.py", "not readiness.closed"), {"closed-grammars"}),
        ("no_such_module", {FRAME}),
    ],
)
def test_another_part_of_the_review_gives_a_reason(concern: str, words: set[str]) -> None:
    findings = examine(more=[(concern, "its mirror changed"), (concern, "its mirror changed")])
    assert unlike(findings) == words
    assert all(findings[word]["because"] == ["its mirror changed"] for word in words)


def test_a_change_of_the_classes_that_run_concerns_the_seams_words() -> None:
    seam = "vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_nans_in_logits"
    changed = {"seams": [seam], "new": True, "detail": "Other overrides it"}
    pairs = list(
        verdicts.of_classes(
            [changed, {**changed, "new": False, "detail": "as before"}], seams(), overlaid()
        )
    )
    findings = examine(more=pairs)
    assert unlike(findings) == {"readback"}
    assert findings["readback"]["because"] == ["Other overrides it"]


def test_what_all_share_is_counted_as_no_feature_and_no_fix() -> None:
    for dead, alive in (([], {}), (["A"], {"sampler-copies"})):
        heading, *_, rows = verdicts.section([*examine(dead=dead, alive=alive).values()])
        total = len({*registry.FEATURES, *registry.FIXES})
        held = len(alive) if dead else total
        assert heading == f"Features and fixes: {held} of {total} hold as they are"
        assert len(rows) == total + 1


@pytest.mark.parametrize(("models", "said"), [(["A", "B"], "A, B"), ([OTHER], "every model")])
def test_what_is_dead_on_models_is_said_and_still_judged(models: list[str], said: str) -> None:
    findings = examine(dead=models, alive={"sampler-copies", "sessions"})
    assert unlike(findings) == set()
    assert {n for n, f in findings.items() if not f["dead"]} == {
        "sampler-copies",
        "sessions",
        FRAME,
    }
    rows = {row[0]: row[2] for row in verdicts.section([*findings.values()])[3]}
    assert rows["history"] == f"holds; dead on {said}"
    assert rows["sampler-copies"] == "holds"
    *_, sentence = verdicts.sentences([*findings.values()])
    assert sentence.startswith(
        f"on {said.replace(',', ' and')} what the overlay does in Model Runner V1 does nothing"
    )
    assert "only sampler-copies still do something" in sentence


def test_an_overlay_without_words_has_no_verdicts(tmp_path: Any) -> None:
    empty = Vocabulary(tmp_path)
    assert verdicts.examine(empty, seams(), patches(), (), ()) == []
    assert list(verdicts.sentences([])) == []
