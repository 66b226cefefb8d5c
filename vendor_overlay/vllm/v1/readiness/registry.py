"""Registry: every word of VLLM_READINESS, declared once.

A *feature* keeps the outputs of stock vLLM, bit for bit. A *fix* changes only wrong outputs. The
switch, the live batch, the overlay tool, the review and the documentation's tests read the words
here. A patch names the words that need it under ``Serves:``.

The module imports nothing of vLLM: the overlay tool runs it separately.
"""

# mirrors: nothing

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from graphlib import TopologicalSorter
from importlib import import_module
from types import MappingProxyType
from typing import Any


class Word(str):
    """Name of a feature or fix in VLLM_READINESS, with its declaration.

    Args:
        name: lower-case with dashes.
        summary: purpose, in one line.
        homes: modules below ``vllm.v1.readiness``; the folder names the process. ``module:Class``
            for a class that a live batch instantiates.
        is_fix: whether it may change outputs.
        needs: words that it builds on; it is disabled if any of them is disabled.
        before: words whose objects a live batch creates and calls after this word's.
        on_v2: whether it works under Model Runner V2. True if some of its seams are in V2's files,
            the scheduler or the front end, and those work without the others.
    """

    __slots__ = ("before", "homes", "is_fix", "needs", "on_v2", "summary")

    summary: str
    homes: tuple[str, ...]
    is_fix: bool
    needs: "tuple[Word, ...]"
    before: "tuple[Word, ...]"
    on_v2: bool

    def __new__(
        cls,
        name: str,
        summary: str,
        *homes: str,
        is_fix: bool,
        needs: "tuple[Word, ...]" = (),
        before: "tuple[Word, ...]" = (),
        on_v2: bool = False,
    ) -> "Word":
        """Create the string."""
        word = super().__new__(cls, name)
        word.summary, word.homes, word.is_fix = summary, homes, is_fix
        word.needs, word.before, word.on_v2 = needs, before, on_v2
        return word

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as a plain string."""
        return str, (str(self),)


_feature = partial(Word, is_fix=False)
_fix = partial(Word, is_fix=True)

HISTORY = _feature(
    "history",
    "token_ids_cpu receives sampled tokens as they arrive; each wait has an owner",
    "outputs.history:History",
)
READBACK = _feature(
    "readback",
    "outputs arrive by one pinned copy with an event; no blocking copy",
    "outputs.model_outputs:Outputs",
)
THINKING_BUDGET = _feature(
    "thinking-budget",
    "markers searched in new tokens only; waits where a force may be due",
    "sample.thinking_budget:ThinkingBudget",
    needs=(HISTORY,),
)
PENALTIES = _feature(
    "penalties",
    "penalties from counts on the device; no cost grows with the output",
    "sample.penalties:Penalties",
    needs=(HISTORY,),
)
BAD_WORDS = _feature(
    "bad-words",
    "bad words matched and masked on the device, without a wait",
    "sample.bad_words:BadWords",
    "sample.bad_words_torch",
    needs=(HISTORY,),
)
SAMPLER_COPIES = _feature(
    "sampler-copies",
    "logits are copied and converted only where something changes them",
    "sample.sampler_copies",
    "sample.sampler_copies_mrv2",
    on_v2=True,
)
STEP_INPUTS = _feature(
    "step-inputs",
    "requests and inputs of a step are updated for the whole batch, with one upload",
    "inputs.step_metadata:StepMetadata",
    "inputs.step_inputs:StepInputs",
)
BLOCK_TABLES = _feature(
    "block-tables",
    "a step sends only changed block ids, and computes no unused slot mappings",
    "inputs.block_tables:BlockTables",
    "inputs.slot_mappings",
)
ROPE_POSITIONS = _feature(
    "rope-positions",
    "positions of several dimensions are sent without a wait",
    "inputs.rope_positions:RopePositions",
)
INPUT_IDS = _feature(
    "input-ids",
    "input ids and drafts are placed for the whole batch, with one upload",
    "inputs.input_ids:InputIds",
)
SEEDS = _feature(
    "seeds",
    "all requests with a seed are drawn by one launch, with torch's bits",
    "sample.seeds:Seeds",
)
LOGPROBS = _feature(
    "logprobs",
    "logprobs are built only for outputs that return them; tokens decoded once",
    "frontend.logprobs",
    "frontend.logprob_messages",
    "frontend.token_texts",
    on_v2=True,
)
GRAMMARS = _feature(
    "grammars",
    "only masks of rows with a grammar are sent, without a wait",
    "sample.grammars:Grammars",
    "core.grammar_masks",
    on_v2=True,
)

ACCEPTED_COUNTS = _fix(
    "accepted-counts",
    "a request of a hybrid model reads its own count of accepted drafts",
    "inputs.accepted_counts:AcceptedCounts",
)
ALLOWED_TOKENS = _fix(
    "allowed-tokens",
    "a request's allowed tokens do not restrict other requests",
    "sample.allowed_tokens:AllowedTokens",
)
CLOSED_GRAMMARS = _fix(
    "closed-grammars",
    "a complete grammar ends its request before min_tokens, without an error",
    "sample.closed_grammars:ClosedGrammars",
)
CPU_PINNING = _fix(
    "cpu-pinning", "memory is pinned only where the platform has pinned memory", "engine.pinning"
)
EMPTY_STATES = _fix(
    "empty-states",
    "a prompt of one token begins with an empty recurrent state",
    "inputs.empty_states:EmptyStates",
)
DRAFTER_RANKS = _fix(
    "drafter-ranks",
    "a data-parallel rank that does not draft runs its drafter for the others",
    "inputs.drafter_ranks:DrafterRanks",
)
FAILED_LOADS = _fix(
    "failed-loads",
    "no reply, and no block of the prefix cache, is made from a failed KV load",
    "core.failed_loads",
    "core.in_flight",
    "inputs.restarts:Restarts",
    on_v2=True,
)
LOST_WAKEUPS = _fix(
    "lost-wakeups",
    "an engine's processes read messages whose announcement was lost",
    "engine.lost_wakeups",
    on_v2=True,
)
ORPHAN_DRAFTS = _fix(
    "orphan-drafts",
    "a request left out of a step keeps no placeholders of drafts",
    "core.orphan_drafts",
    on_v2=True,
)
PLUGIN_PROCESSORS = _fix(
    "plugin-processors",
    "a logits processor from an entry point reads each sampled token",
    "sample.readers",
)
REFUSED_GRAMMARS = _fix(
    "refused-grammars",
    "a grammar that cannot be compiled ends only its own request",
    "core.refused_grammars",
    on_v2=True,
)
GRAMMAR_LIMITS = _fix(
    "grammar-limits",
    "a grammar that takes too much time or memory is refused",
    "frontend.grammar_limits",
    "frontend.grammar_trials",
    on_v2=True,
)
PREEMPTION = _fix(
    "preemption",
    "a preempted request receives each token in flight once and in order",
    "core.preemption",
    on_v2=True,
)
PINNED_INPUTS = _fix(
    "pinned-inputs",
    "a step's pinned inputs stay until the device has read them",
    "inputs.pinned_inputs",
)
PROMPT_EMBEDS = _fix(
    "prompt-embeds",
    "prompts of embeddings work with drafts in flight",
    "inputs.prompt_embeds:PromptEmbeds",
)
ROW_STATE = _fix(
    "row-state", "a row keeps no state of an earlier request", "inputs.row_state:RowState"
)
RECOVERED_TOKENS = _fix(
    "recovered-tokens",
    "a token that replaces a draft is in the vocabulary",
    "sample.recovered_tokens",
)
STOP_TOKENS = _fix(
    "stop-tokens",
    "min_tokens ignores stop tokens outside the vocabulary",
    "sample.stop_tokens:StopTokens",
)
CPU_SEEDS = _fix(
    "cpu-seeds",
    "on the CPU, a seed applies with chunked prompts and in mixed batches",
    "sample.cpu_seeds:CpuSeeds",
)
CPU_DRAFTS = _fix(
    "cpu-drafts",
    "on the CPU, drafts are sampled with their request's parameters",
    "sample.cpu_drafts",
)
UNDRAFTED_ROWS = _fix(
    "undrafted-rows",
    "a hybrid model's row without drafts continues from its own state",
    "inputs.undrafted_rows:UndraftedRows",
)
PROMPT_LOGITS = _fix(
    "prompt-logits",
    "logprobs_mode applies to the logprobs of prompts",
    "sample.prompt_logits:PromptLogits",
)
CACHED_PROMPT_LOGPROBS = _fix(
    "cached-prompt-logprobs",
    "positions of a prompt that were not computed have no logprobs",
    "frontend.cached_prompt_logprobs:CachedPromptLogprobs",
    on_v2=True,
)
UNIFORM_DECODE = _fix(
    "uniform-decode",
    "no prompt of a hybrid model takes the CUDA graph of decodes",
    "inputs.uniform_decode:UniformDecode",
)
LOGPROB_TOKENS = _fix(
    "logprob-tokens",
    "logprob_token_ids of a request do not change other requests' logprobs",
    "sample.logprob_tokens",
)
WINDOW_BLOCKS = _fix(
    "window-blocks",
    "a sliding window keeps its blocks while drafts may be rejected",
    "core.window_blocks",
    on_v2=True,
)
BLOCK_IDS = _fix(
    "block-ids",
    "no list of block ids grows for as long as the engine runs",
    "core.block_ids",
    on_v2=True,
)
BAD_REQUESTS = _fix(
    "bad-requests",
    "a request that the engine cannot serve is refused, without harm to others",
    "frontend.bad_requests",
    "frontend.request_types",
    on_v2=True,
)
THINKING_ROWS = _fix(
    "thinking-rows",
    "a thinking budget stays with its own request",
    "sample.thinking_fixes:ThinkingFixes",
    before=(THINKING_BUDGET,),
)
THINKING_SECTIONS = _fix(
    "thinking-sections",
    "a thinking budget holds for each section of thinking",
    "sample.thinking_fixes:ThinkingFixes",
    needs=(THINKING_ROWS,),
    before=(THINKING_BUDGET,),
)
THINKING_UNLIMITED = _fix(
    "thinking-unlimited",
    "a thinking budget of -1 never ends the thinking",
    "sample.thinking_fixes:ThinkingFixes",
    before=(THINKING_BUDGET,),
)
SESSIONS = _fix(
    "sessions",
    "each turn of a streaming session begins where the previous one ended",
    "core.sessions",
    on_v2=True,
)

#: Name to declaration, features first.
WORDS: Mapping[str, Word] = MappingProxyType(
    {word: word for word in tuple(vars().values()) if isinstance(word, Word)}
)
#: Feature to its summary.
FEATURES: Mapping[str, str] = MappingProxyType(
    {word: word.summary for word in WORDS.values() if not word.is_fix}
)
#: Fix to its summary.
FIXES: Mapping[str, str] = MappingProxyType(
    {word: word.summary for word in WORDS.values() if word.is_fix}
)
#: Group to its members.
GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"features": frozenset(FEATURES), "fixes": frozenset(FIXES)}
)
ALL = frozenset(WORDS)
#: Words that work under Model Runner V2. Of ``grammars``, only the filling of masks does.
ON_V2 = frozenset(word for word in WORDS.values() if word.on_v2)


def with_needs(names: Iterable[str]) -> frozenset[str]:
    """Add the words that ``names`` build on."""
    names = frozenset(names)
    return names.union(*(WORDS[name].needs for name in names))


def without(names: Iterable[str], on: frozenset[str]) -> frozenset[str]:
    """Return ``on`` without ``names``, and without all words that need them."""
    left, gone = on - frozenset(names), frozenset(names)
    while gone:
        gone = frozenset(name for name in left if not left.issuperset(WORDS[name].needs))
        left -= gone
    return left


def classes(on: Iterable[str]) -> Iterator[type[Any]]:
    """Import each class that a live batch instantiates for these words, in order."""
    graph: dict[str, set[str]] = {name: {*word.needs} for name, word in WORDS.items()}
    for word in WORDS.values():
        for later in word.before:
            graph[later].add(word)
    homes = [
        home
        for name in TopologicalSorter(graph).static_order()
        if name in on
        for home in WORDS[name].homes
    ]
    for home in dict.fromkeys(homes):
        module, _, name = home.partition(":")
        if name:
            yield getattr(import_module(f"vllm.v1.readiness.{module}"), name)
