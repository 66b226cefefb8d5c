"""The fixes and upstream: which release mends what a fix mends, and which fixes can go.

:data:`MENDS` is the owner of what is known of upstream, for patches as for fixes without one.
docs/fixes.md shows it, and a patch may repeat its release in ``Applied-Upstream``, DEP-3's field
for that; the tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

#: The newest release whose sources were read for :data:`MENDS`.
READ = "0.33.0"

#: What a release has of a fix.
MENDED, PARTLY, NOT_MENDED, UNKNOWN = "mended", "mended in part", "not mended", "not known"


@dataclass(frozen=True)
class Mend:
    """Upstream's own mend of what a fix mends.

    Attributes:
        bugs: upstream's issues and pull requests, by number, and its advisories (GHSA-...).
        since: the first release that has all of it; None if :data:`READ` has not.
        partly: release to the part of it that this release was the first to have.
        patches: the names of the fix's patches without their numbers. A fix without any uses
            the seams of others.
    """

    bugs: tuple[str, ...] = ()
    since: str | None = None
    partly: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()

    @property
    def addresses(self) -> list[str]:
        """The web address of each of the bugs."""
        return [f"{_PROJECT}/{_PLACES[bug.startswith('GHSA-')]}/{bug}" for bug in self.bugs]


_PROJECT = "https://github.com/vllm-project/vllm"
_PLACES = {False: "issues", True: "security/advisories"}

#: Fix to what upstream has of it; read in the releases' sources up to :data:`READ`.
MENDS: Mapping[str, Mend] = MappingProxyType(
    {
        "recovered-tokens": Mend(
            bugs=("GHSA-8wr5-jm2h-8r4f",),
            since="0.24.0",
            patches=("keep-recovered-tokens-inside-the-vocabulary",),
        ),
        "thinking-rows": Mend(
            partly={
                "0.28.0": "exchanged rows",
            },
        ),
        "allowed-tokens": Mend(
            bugs=("43894",),
            since="0.31.0",
            patches=("keep-each-request-s-allowed-tokens-to-its-own-row",),
        ),
        "row-state": Mend(
            bugs=(
                "57719",
                "57974",
                "49757",
                "55192",
            ),
            partly={
                "0.27.0": "block ids",
                "0.29.0": "the flag of pooled requests",
                "0.31.0": "prompt embeddings",
            },
            patches=("keep-a-request-from-finding-another-s-state-in-its-row",),
        ),
        "prompt-embeds": Mend(
            bugs=("57356",),
            since="0.31.0",
            patches=("mark-tokens-as-tokens-where-drafts-are-in-flight",),
        ),
        "logprob-tokens": Mend(
            bugs=("42592",),
            patches=("leave-each-request-the-logprobs-that-it-asked-for",),
        ),
        "window-blocks": Mend(
            bugs=("47728",),
            since="0.26.0",
            patches=("keep-a-window-s-blocks-while-drafts-may-still-be-rejected",),
        ),
        "empty-states": Mend(
            bugs=("51562",),
            partly={
                "0.31.0": "gated delta nets",
            },
            patches=("begin-a-prompt-of-one-token-with-an-empty-recurrent-state",),
        ),
        "uniform-decode": Mend(
            bugs=(
                "49918",
                "53051",
                "47123",
                "53059",
            ),
            patches=("keep-prompts-of-hybrid-models-out-of-the-cuda-graph-of",),
        ),
        "accepted-counts": Mend(
            bugs=(
                "45100",
                "51571",
                "51599",
                "53919",
            ),
            partly={
                "0.24.0": "without prefix caching",
            },
            patches=("read-each-request-s-own-count-of-accepted-drafts",),
        ),
        "stop-tokens": Mend(
            since="0.29.0",
        ),
        "bad-requests": Mend(
            bugs=("51299",),
            partly={
                "0.24.0": "logprob_token_ids",
                "0.29.0": "min_tokens and prompts",
            },
            patches=("refuse-a-request-that-the-engine-cannot-serve",),
        ),
        "refused-grammars": Mend(
            since="0.26.0",
            patches=("end-only-the-request-whose-grammar-cannot-be-compiled",),
        ),
        "grammar-limits": Mend(
            bugs=("54003", "45118"),
            partly={"0.24.0": "a timeout for regexes"},
            patches=("refuse-a-grammar-that-takes-too-much-time-or-memory",),
        ),
        "orphan-drafts": Mend(
            bugs=("37159",),
            since="0.25.0",
            patches=("discard-the-draft-placeholders-of-skipped-requests",),
        ),
        "preemption": Mend(
            bugs=("48245",),
            since="0.27.0",
            patches=("deliver-a-preempted-request-s-tokens-in-flight-once-and-in",),
        ),
        "failed-loads": Mend(
            bugs=("45138", "45430", "49252"),
            patches=("drop-what-was-computed-from-a-kv-load-that-failed",),
        ),
        "pinned-inputs": Mend(
            bugs=("47644", "48214"),
            partly={"0.26.0": "pooling models"},
            patches=("keep-a-step-s-pinned-inputs-until-the-device-has-read-them",),
        ),
        "lost-wakeups": Mend(
            bugs=("45224",),
            since="0.27.0",
            patches=("look-for-a-message-though-its-announcement-was-lost",),
        ),
        "drafter-ranks": Mend(
            bugs=("40589",),
            since="0.25.0",
            patches=("run-the-drafter-on-each-data-parallel-rank-if-it-runs-on-any",),
        ),
        "block-ids": Mend(
            bugs=("44175",),
            since="0.26.0",
            patches=("drop-block-ids-that-the-worker-never-reads",),
        ),
        "cpu-pinning": Mend(
            since="0.24.0",
            patches=("pin-memory-only-where-the-platform-has-pinned-memory",),
        ),
        "cpu-seeds": Mend(
            partly={
                "0.31.0": "seeds beside requests without one",
            },
            patches=(
                "prefill-a-seeded-request-in-chunks-on-the-cpu",
                "let-each-seed-count-in-a-batch-of-the-cpu",
            ),
        ),
        "cpu-drafts": Mend(
            bugs=("55005",),
            patches=("sample-drafts-on-the-cpu-with-their-request-s-parameters",),
        ),
        "thinking-sections": Mend(
            bugs=(
                "43757",
                "45984",
            ),
            since="0.26.0",
        ),
        "undrafted-rows": Mend(
            bugs=("56531",),
            since="0.32.0",
            patches=("let-a-row-without-drafts-continue-from-its-own-recurrent",),
        ),
        "plugin-processors": Mend(
            bugs=(
                "52461",
                "38199",
                "52698",
            ),
        ),
        "closed-grammars": Mend(
            bugs=(
                "53665",
                "54218",
            ),
            since="0.29.0",
            patches=("let-a-complete-grammar-end-its-request-before-min-tokens",),
        ),
        "prompt-logits": Mend(
            bugs=("47680",),
            since="0.26.0",
            patches=("give-the-logits-of-a-prompt-where-the-logprobs-mode-asks-for",),
        ),
        "cached-prompt-logprobs": Mend(
            bugs=("42019",),
            patches=("give-no-logprobs-for-positions-of-a-prompt-that-were-not",),
        ),
        "thinking-unlimited": Mend(
            since="0.23.0",
        ),
        "sessions": Mend(
            bugs=(
                "52693",
                "42490",
                "42655",
                "42760",
            ),
            partly={
                "0.31.0": "max_tokens",
                "0.32.0": "block hashes",
                "0.33.0": "the count of tokens",
            },
            patches=("begin-each-turn-of-a-session-where-the-one-before-has-ended",),
        ),
    }
)


def judge(
    mends: Mapping[str, Mend], release: str, patches: Sequence[JudgedPatch]
) -> list[dict[str, Any]]:
    """Set what upstream mended beside what the merge says of each fix's patches.

    Args:
        mends: by fix.
        release: the version under review.
        patches: of the whole series, judged.

    Returns:
        The entries under "fixes" in review.json, in the order of ``mends``.
    """
    has = {name: _has(mend, release) for name, mend in mends.items()}
    by_title = {judged.patch.name.partition("-")[2]: judged for judged in patches}
    entries = []
    for name, mend in mends.items():
        own = [by_title[f"{title}.patch"] for title in mend.patches if f"{title}.patch" in by_title]
        sharing = {
            judged.patch.name: sorted(_keepers(judged, mends, has) - {name}) for judged in own
        }
        word, because = has[name]
        todo, look = _todo(word, own, sharing)
        entries.append(
            {
                "name": name,
                "bugs": list(mend.bugs),
                "has": word,
                "because": because,
                "patches": [{"name": p.patch.name, "verdict": p.verdict} for p in own],
                "todo": todo,
                "look": look,
            }
        )
    return entries


def warnings(fixes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each of :func:`judge`'s entries that needs a decision."""
    for fix in fixes:
        if fix["look"]:
            yield f"the fix {fix['name']} is {fix['has']} ({fix['because']}): {fix['todo']}"


def _has(mend: Mend, release: str) -> tuple[str, str]:
    """What a release has of a fix, and how that is known."""
    version = Version(release)
    if mend.since is not None and Version(mend.since) <= version:
        return MENDED, f"since {mend.since}"
    parts = [f"{part} since {first}" for first, part in mend.partly.items()]
    there = [p for p, first in zip(parts, mend.partly, strict=True) if Version(first) <= version]
    if mend.since is None and version > Version(READ):
        return UNKNOWN, "; ".join([f"{READ} is the newest release that was read", *there])
    what = "the rest" if there else "it"
    later = f"{mend.since} has {what}" if mend.since else f"no release up to {READ} has {what}"
    return (PARTLY, "; ".join([*there, later])) if there else (NOT_MENDED, later)


def _keepers(
    judged: JudgedPatch, mends: Mapping[str, Mend], has: Mapping[str, tuple[str, str]]
) -> set[str]:
    """The fixes that still need a patch."""
    title = judged.patch.name.partition("-")[2].removesuffix(".patch")
    return {
        name for name, mend in mends.items() if title in mend.patches and has[name][0] != MENDED
    }


def _todo(
    has: str, patches: Sequence[JudgedPatch], sharing: Mapping[str, Sequence[str]]
) -> tuple[str, bool]:
    """What to do about a fix, and whether that needs a decision."""
    numbers = {judged.patch.name: judged.patch.name.partition("-")[0] for judged in patches}
    obsolete = [numbers[p.patch.name] for p in patches if p.verdict == OBSOLETE]
    conflicting = [numbers[p.patch.name] for p in patches if p.verdict == CONFLICTS]
    if has == UNKNOWN:
        return "read the release's source", True
    if has == PARTLY:
        return "keep it, and read what is left of it", True
    if has == NOT_MENDED:
        if obsolete:
            listed = ", ".join(obsolete)
            return f"read the release: {listed} is obsolete, and no mend is known", True
        return "keep it" + (f", and resolve {', '.join(conflicting)}" * bool(conflicting)), False
    phrases = ["drop it"] if patches else ["drop it; no patch is its own"]
    for judged in patches:
        number, others = numbers[judged.patch.name], sharing[judged.patch.name]
        if others:
            phrases.append(f"keep {number} for {', '.join(others)}")
        elif judged.verdict == OBSOLETE:
            phrases.append(f"drop {number}")
        elif judged.verdict == CONFLICTS:
            phrases.append(f"drop {number} rather than resolve it")
        else:
            phrases.append(f"drop {number}, though it applies: upstream mended it elsewhere")
    return "; ".join(phrases), True
