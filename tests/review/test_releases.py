"""Real releases, whole, and the names that the overlay really uses.

The wheels are downloaded once into build/wheels/releases; inferring the names takes minutes.
"""

import re
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from overlay import pin
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.patches import Series
from overlay.pin import sha256
from packaging.version import Version
from review import __main__ as program
from review import markdown, matrix, merging, review, wheels
from review.fates import fates
from review.fixes import MENDED, MENDS, NOT_MENDED, PARTLY, READ, Mend
from review.index import STATED
from review.uses import Use
from review.wheels import Release
from series.upstream import Upstream, from_installation
from support import names, releases
from support.cherry_pick import assert_same_as_git
from support.documented import form
from support.sites import OVERLAY, REPO, UPSTREAM
from support.tables import rows
from vllm.v1.readiness.engine.switch import NAME

pytestmark = pytest.mark.slow

Real = tuple[Release, dict[str, Any], Path]


@pytest.fixture(scope="module")
def base() -> Upstream:
    """Upstream's files of the pinned release."""
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@pytest.fixture(scope="module")
def overlay_uses(base: Upstream) -> list[Use]:
    """The uses of this overlay."""
    return names.overlay_uses(base)


@pytest.fixture(scope="module")
def reviews(
    base: Upstream, overlay_uses: list[Use], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Real]:
    """Reviews of real releases, each made once: the release, review.json, and its folder."""
    folder = tmp_path_factory.mktemp("reviews")

    @cache
    def reviewed(version: str) -> Real:
        wheel = releases.release(version)
        result = review.of_release(OVERLAY, base, wheel, folder, overlay_uses)
        return wheel, result, folder / wheel.version

    return reviewed


@pytest.fixture(params=["0.22.1", "0.23.0", "0.33.0"])
def real(request: pytest.FixtureRequest, reviews: Callable[[str], Real]) -> Real:
    return reviews(request.param)


def test_verdicts_are_those_of_git(real: Real, base: Upstream, tmp_path: Path) -> None:
    wheel, result, _ = real
    merged = merging.merge(OVERLAY.series, base, wheel.upstream)
    before, after = (
        {path: upstream.read(path) for path in OVERLAY.targets}
        for upstream in (base, wheel.upstream)
    )
    assert_same_as_git(tmp_path / "tree", OVERLAY.series, before, after, merged)
    verdicts = [patch["verdict"] for patch in result["patches"]]
    assert verdicts == [judged.verdict for judged in merged.patches]
    assert result["candidate"]["conflicts"] == sorted(merged.conflicts)


def test_the_candidate_applies_to_the_release(real: Real, tmp_path: Path) -> None:
    wheel, result, folder = real
    candidate, described = folder / review.CANDIDATE, result["candidate"]
    listed = (candidate / "patches" / "series").read_text().split()
    for name in listed:
        file = candidate / "patches" / name
        complete = name in described["patches"]
        assert file.exists() is complete
        data = (file if complete else file.with_name(f"{name}.incomplete")).read_bytes()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "series").write_text("".join(f"{name}\n" for name in listed))
    patches = Series.load(tmp_path)
    assert sorted(described["vendored"] + described["conflicts"]) == OVERLAY.targets
    for path in described["vendored"]:
        overlaid = patches.apply(path, wheel.upstream.read(path))
        assert overlaid == (candidate / "vendor_overlay" / path).read_bytes()
        assert patches.reverse(path, overlaid) == wheel.upstream.read(path)
    assert (candidate / pin.NAME).exists() is (described["conflicts"] == [])
    # Conflicts are beside it, with git's markers.
    marked = {
        (patch["name"].removesuffix(".patch"), file["path"])
        for patch in result["patches"]
        for file in patch["files"]
        if patch["verdict"] == "conflicts"
        and any(hunk["verdict"] in ("conflicts", "gone") for hunk in file["hunks"])
    }
    conflicts = candidate / "conflicts"
    files = {tuple(str(f.relative_to(conflicts)).split("/", 1)) for f in conflicts.rglob("*.py")}
    assert files == marked
    for name, path in files:
        assert "<" * 31 + " release\n" in (conflicts / name / path).read_text()


def test_the_waiver_has_the_verdicts_of_the_release(
    real: Real, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """By the program, as `make waiver RELEASE=` runs it, with the review that was made above."""
    wheel, result, _ = real
    monkeypatch.setattr(review, "of_release", lambda *_: result)
    (tmp_path / "wheels").symlink_to(releases.FOLDER)
    command = ["waiver", wheel.version, "--site", str(UPSTREAM), "--out", str(tmp_path)]
    assert program.main(command) == Exit.DONE
    text = capsys.readouterr().out
    assert f"| on vLLM {wheel.version} |" in text
    table = rows(text)
    verdicts = [patch["verdict"] for patch in result["patches"]]
    assert [row[-1].partition(": ")[0] for row in table] == verdicts
    for verdict in ("applies", "moved", "conflicts", "obsolete"):
        assert f"{verdicts.count(verdict)} {verdict} (" in text
    mended = {fix for fix, mend in MENDS.items() if mend.patches and has_all(mend, wheel.version)}
    said = {word for row in table for word in re.findall("`([^`]+)` is mended \\(", row[-1])}
    assert said == mended
    assert len(mended) == {"0.22.1": 0, "0.23.0": 0, "0.33.0": 14}[wheel.version]


def has_all(mend: Mend, version: str) -> bool:
    return mend.since is not None and Version(mend.since) <= Version(version)


def test_a_release_with_the_same_files_is_clean(reviews: Callable[[str], Real]) -> None:
    _, result, folder = reviews("0.22.1")
    assert result["verdict"] == "unchanged"
    assert {patch["verdict"] for patch in result["patches"]} == {"applies"}
    assert {name["fate"] for name in result["names"]} == {"same"}
    assert {word["verdict"] for word in result["words"]} == {"holds"}
    assert not any(finding["new"] for finding in result["classes"])
    assert {(fix["has"], fix["todo"]) for fix in result["fixes"]} == {("not mended", "keep it")}
    assert len(result["names"]) > 100
    assert [result[key] for key in ("mirrors", "callees", "patched")] == [[], [], []]
    candidate = folder / review.CANDIDATE
    for file in (REPO / "patches").iterdir():
        assert (candidate / "patches" / file.name).read_bytes() == file.read_bytes()
    new = pin.loads((candidate / pin.NAME).read_text())
    assert new.release == "0.22.1"
    assert (new.upstream, new.result) == (OVERLAY.pin.upstream, OVERLAY.pin.result)
    for path in OVERLAY.targets:
        vendored = (candidate / "vendor_overlay" / path).read_bytes()
        assert sha256(vendored) == OVERLAY.pin.result[path]


def test_the_next_release_conflicts(reviews: Callable[[str], Real]) -> None:
    """As docs/releases.md walks through it."""
    _, result, folder = reviews("0.23.0")
    assert result["verdict"] == "conflicts"
    conflicts = [p["name"][:4] for p in result["patches"] if p["verdict"] == "conflicts"]
    text = " ".join((REPO / "docs" / "releases.md").read_text().split())
    assert f"that {' and '.join(conflicts)} conflict" in text
    changed = {name["name"] for name in result["names"] if name["fate"] != "same"}
    assert "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params" in changed
    text = (folder / review.MARKDOWN).read_text()
    for patch in result["patches"]:
        assert patch["because"] in text.replace("\\", "")


def test_what_is_called_and_mirrored_is_said_of_the_next_release(
    reviews: Callable[[str], Real],
) -> None:
    """Each of these patches applies, and each of these functions is one call away from a seam."""
    _, result, _ = reviews("0.23.0")
    found = {each["what"]: each for key in ("mirrors", "callees") for each in result[key]}
    sampling = "vllm.v1.sample."
    for what, kind in {
        f"{sampling}rejection_sampler.rejection_sample": "signature",
        f"{sampling}ops.topk_topp_sampler.apply_top_k_top_p": "body",
        f"{sampling}thinking_budget_state.ThinkingBudgetStateHolder": "body",
        "vllm.v1.worker.gpu.spec_decode.init_speculator": "body",
        "vllm.v1.utils.CpuGpuBuffer.__init__": "body",
        "vllm.config.vllm.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES": "body",
    }.items():
        assert found[what]["kind"] == kind
        assert found[what]["diff"]
    holder = found[f"{sampling}thinking_budget_state.ThinkingBudgetStateHolder"]
    assert "_apply_forcing_to_logits" in holder["detail"]
    assert holder["ours"] == [
        f"{names.PACKAGE}/sample/thinking_{m}.py" for m in ("budget", "fixes")
    ]
    # A person reads each definition once.
    texts = [
        each["what"]
        for key in ("mirrors", "callees", "patched")
        for each in result[key]
        if not each["elsewhere"]
    ]
    changed = {name["name"] for name in result["names"] if name["fate"] != "same"}
    assert len(texts) == len(set(texts))
    assert changed.isdisjoint(texts)


def test_the_next_release_says_what_runs_and_what_can_be_carried_over(
    reviews: Callable[[str], Real],
) -> None:
    """Llama and Mistral go to Model Runner V2, and the CPU replaces a function with a seam."""
    _, result, _ = reviews("0.23.0")
    first, *_ = result["summary"]
    dense = "ForCausalLM (dense, unquantized)"
    assert f"Model Runner V2 for Llama{dense}, Mistral{dense} and Qwen3{dense}" in first
    words = {word["name"]: word for word in result["words"]}
    cannot = {name for name, word in words.items() if word["verdict"] == "cannot hold"}
    assert cannot == {"sampler-copies", "cpu-seeds", "frame"}
    assert words["history"]["dead"] == [f"Llama{dense}", f"Mistral{dense}"]
    assert words["sampler-copies"]["dead"] == words["sessions"]["dead"] == []
    assert words["thinking-unlimited"]["verdict"] == "droppable"
    because = {name: " ".join(word["because"]) for name, word in words.items()}
    assert "ThinkingBudgetStateHolder: body, mirrored by" in because["thinking-budget"]
    assert "rejection_sampler.sample_recovered_tokens: signature, " in because["seeds"]
    switch = f"{NAME}={','.join(f'-{name}' for name in words if name in cannot - {'frame'})}"
    text = " ".join((REPO / "docs" / "releases.md").read_text().split())
    assert switch in text
    assert any(sentence.endswith(switch) for sentence in result["summary"])
    made, replaced = (f for f in result["classes"] if f["new"])
    assert "CPUWorker.init_device has vllm.v1.worker.cpu.model_runner." in made["detail"]
    assert replaced["detail"].startswith("vllm.v1.worker.cpu.shm replaces vllm.utils.torch_utils.")
    assert any("vllm.v1.worker.cpu.shm" in why for why in words["cpu-pinning"]["because"])


def test_the_matrix_of_real_releases(reviews: Callable[[str], Real], tmp_path: Path) -> None:
    """Each cell is a verdict of a review, and leads to it."""
    versions = ("0.22.1", "0.23.0", "0.33.0")
    columns = [matrix.column(each, partial(lambda v: reviews(v)[1], each)) for each in versions]
    made = matrix.assemble("0.22.1..latest", OVERLAY.pin, columns)
    assert matrix.code(made) == 11
    assert made["newest"] == "0.22.1"
    cells = {row["name"]: [cell["verdict"] for cell in row["cells"]] for row in made["words"]}
    assert cells["sampler-copies"] == ["holds", "cannot hold", "cannot hold"]
    assert cells["thinking-unlimited"] == ["holds", "droppable", "droppable"]
    first = {row["name"]: row["first"] for row in made["words"]}
    assert first["history"] == {"release": "0.23.0", "state": "needs eyes"}
    assert first["cpu-drafts"] == {"release": "0.23.0", "state": "dead"}
    for row in made["words"]:
        for version, cell in zip(versions, row["cells"], strict=True):
            file, _, anchor = cell["url"].partition("#")
            assert file == f"{version}/{review.PAGE}"
            page = (reviews(version)[2] / review.PAGE).read_text()
            assert page.count(f'id="{anchor}"') == 1
    assert len(matrix.report(made)) < markdown.LIMIT
    matrix.write(made, tmp_path)


def test_the_fields_of_real_reviews_are_documented(reviews: Callable[[str], Real]) -> None:
    known = form(review.JSON)
    for version in ("0.22.1", "0.23.0", "0.33.0"):
        known.check(reviews(version)[1])
    assert known.faults == set()


def test_model_runner_v2_for_every_model_is_said(reviews: Callable[[str], Real]) -> None:
    _, result, _ = reviews("0.33.0")
    assert "takes Model Runner V2 for every model by default" in result["summary"][0]
    assert any("VLLM_USE_V2_MODEL_RUNNER=0 brings V1 back" in w for w in result["warnings"])


def test_the_newest_release_that_was_read_says_which_fixes_can_go(
    reviews: Callable[[str], Real],
) -> None:
    """allowed-tokens has been mended, row-state in part, and plugin-processors not at all."""
    _, result, folder = reviews(READ)
    has = {fix["name"]: fix["has"] for fix in result["fixes"]}
    assert has == {
        name: MENDED if mend.since else PARTLY if mend.partly else NOT_MENDED
        for name, mend in MENDS.items()
    }
    assert any(w.startswith("the fix allowed-tokens is mended") for w in result["warnings"])
    assert "can go\n" in (folder / review.MARKDOWN).read_text()


@pytest.mark.parametrize("version", ["0.22.1", "0.23.0"])
def test_a_wheel_is_read_without_being_unpacked(version: str) -> None:
    release = releases.release(version)
    file = releases.FOLDER / release.wheel
    assert (release.version, release.proof) == (version, STATED)
    assert release.sha256 == sha256(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        assert release.upstream.paths == tuple(sorted(names))
        for path in OVERLAY.targets:
            assert release.upstream.read(path) == archive.read(path)
    digests = {path: sha256(release.upstream.read(path)) for path in OVERLAY.targets}
    assert (digests == OVERLAY.pin.upstream) == (version == "0.22.1")


def test_a_real_wheel_file_is_proven_by_the_index(tmp_path: Path) -> None:
    release = releases.release("0.23.0")
    file = releases.FOLDER / release.wheel
    again = wheels.obtain(str(file), None, tmp_path, OVERLAY.pin)
    assert (again.sha256, again.proof) == (release.sha256, STATED)
    assert not list(tmp_path.iterdir())
    cut = tmp_path / release.wheel
    cut.write_bytes(file.read_bytes()[: 1 << 20])
    with pytest.raises(OverlayError) as caught:
        wheels.obtain(str(cut), None, tmp_path, OVERLAY.pin)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == f"SHA-256 {release.sha256}"
    assert caught.value.found == f"SHA-256 {sha256(cut.read_bytes())}"
    assert "SHA256=" in caught.value.next_step


RUNNER = "vllm.v1.worker.gpu_model_runner"
BATCHES = "vllm.v1.worker.gpu_input_batch.InputBatch"
THINKING = "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder"


def test_its_own_release_has_every_name_unchanged(overlay_uses: list[Use], base: Upstream) -> None:
    unchanged = fates(overlay_uses, base, base)
    assert {entry["fate"] for entry in unchanged} == {"same"}
    assert all(entry["was"] == entry["now"] for entry in unchanged)
    entries = {(entry["name"], entry["certain"]): entry for entry in unchanged}
    assert len({name for name, _ in entries}) == len(unchanged)
    for name, how in {
        f"{BATCHES}.token_ids_cpu": "read",
        f"{BATCHES}.req_output_token_ids": "read",
        f"{THINKING}._update_think_state": "called",
        f"{THINKING}.sync_batch": "overridden",
        f"{RUNNER}.GPUModelRunner._bookkeeping_sync": "holds a seam",
        f"{RUNNER}.AsyncGPUModelRunnerOutput.sampled_token_ids_cpu": "set",
        "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample": "imported",
        RUNNER: "imported",
    }.items():
        assert how in entries[name, True]["how"], name
    for name in ("get_output", "vllm.config.parallel.ParallelConfig.data_parallel_index"):
        assert (name, False) in entries
    assert not any("readiness" in name for name, _ in entries)
    # Each patched file has a seam in a function or class, whatever is at its top level.
    held = {use.user.partition(":")[0] for use in overlay_uses if use.how == "holds a seam"}
    assert held == set(OVERLAY.targets)


def test_changes_to_names_of_the_pinned_release(overlay_uses: list[Use], base: Upstream) -> None:
    batch = "vllm.v1.worker.gpu_input_batch.InputBatch"
    thinking = "vllm.v1.sample.thinking_budget_state.ThinkingBudgetStateHolder"
    gumbel = "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample"
    edits = {
        f"{batch}.token_ids_cpu": (b"self.token_ids_cpu = ", b"self.token_ids_cpu = +", "body"),
        f"{thinking}._update_think_state": (
            *(b"def _update_think_state(self, ", b"def _update_think_state(self, now: bool, "),
            "signature",
        ),
        gumbel: (b"def gumbel_sample(", b"def sample_by_gumbel(", "gone"),
    }
    changes = {}
    for name, (old, new, _) in edits.items():
        (path,) = [p for p in base.paths if name.startswith(f"{p[:-3].replace('/', '.')}.")]
        assert base.read(path).count(old) == 1
        changes[path] = base.read(path).replace(old, new)
    release = Upstream(base.paths, lambda path: changes.get(path) or base.read(path))
    entries = fates(overlay_uses, base, release)
    changed = {entry["name"]: entry["fate"] for entry in entries if entry["fate"] != "same"}
    # The function that assigns an attribute has another body, too.
    assert changed.pop(f"{batch}.__init__", "body") == "body"
    assert changed == {name: fate for name, (_, _, fate) in edits.items()}
