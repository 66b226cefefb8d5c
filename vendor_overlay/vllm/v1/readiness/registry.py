"""Registry: every word of VLLM_READINESS, declared once.

A *feature* keeps the outputs of stock vLLM, bit for bit. A *fix* changes only wrong outputs. The
switch, the live batch, the overlay tool, the review and the documentation's tests read the words
here. The ``Serves:`` line of a patch names the words that need the patch.

The module imports nothing of vLLM, because the overlay tool executes it without vLLM.
"""

# mirrors: nothing

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from graphlib import TopologicalSorter
from importlib import import_module
from types import MappingProxyType
from typing import Any


class Word(str):
    """Name of a feature or fix in VLLM_READINESS, in lower case with dashes.

    Attributes:
        homes: modules below ``vllm.v1.readiness``, or ``module:Class`` if a live batch instantiates
            the class. The folder names the process.
        is_fix: whether the word may change outputs.
        needs: words that this word depends on. If any of them is off, this word is off.
        before: words whose objects a live batch creates and calls after this word's object.
        device: ``cpu`` or ``gpu`` if the word takes effect only there; else empty.
        on_v2: whether the word works under Model Runner V2, through seams in V2's files, the
            scheduler or the front end that work without its other seams.
    """

    homes: tuple[str, ...]
    is_fix: bool
    needs: tuple["Word", ...]
    before: tuple["Word", ...]
    device: str
    on_v2: bool

    def __new__(
        cls,
        name: str,
        *homes: str,
        is_fix: bool,
        needs: tuple["Word", ...] = (),
        before: tuple["Word", ...] = (),
        device: str = "",
        on_v2: bool = False,
    ) -> "Word":
        """Create the string."""
        word = super().__new__(cls, name)
        word.homes, word.is_fix, word.on_v2 = homes, is_fix, on_v2
        word.needs, word.before, word.device = needs, before, device
        return word

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as a plain string."""
        return str, (str(self),)


_feature = partial(Word, is_fix=False)
_fix = partial(Word, is_fix=True)

#: Writes sampled tokens into token_ids_cpu as they arrive; each wait has an owner.
HISTORY = _feature("history", "outputs.history:History")
#: Copies outputs to the host with one pinned copy and one event per step.
READBACK = _feature("readback", "outputs.model_outputs:Outputs", device="gpu")
#: Searches only new tokens for markers; waits only if a token may be forced.
THINKING_BUDGET = _feature(
    "thinking-budget", "sample.thinking_budget:ThinkingBudget", needs=(HISTORY,)
)
#: Applies penalties from counts on the device, at a cost independent of output length.
PENALTIES = _feature("penalties", "sample.penalties:Penalties", needs=(HISTORY,))
#: Matches and masks bad words on the device, without a wait.
BAD_WORDS = _feature(
    "bad-words", "sample.bad_words:BadWords", "sample.bad_words_torch", needs=(HISTORY,)
)
#: Copies and converts logits only if a consumer changes them.
SAMPLER_COPIES = _feature(
    "sampler-copies", "sample.sampler_copies", "sample.sampler_copies_mrv2", on_v2=True
)
#: Updates a step's requests and inputs for the whole batch, with one upload.
STEP_INPUTS = _feature(
    "step-inputs",
    "inputs.step_metadata:StepMetadata",
    "inputs.step_inputs:StepInputs",
)
#: Sends only changed block ids; computes no unused slot mappings.
BLOCK_TABLES = _feature(
    "block-tables",
    "inputs.block_tables:BlockTables",
    "inputs.slot_mappings",
    before=(STEP_INPUTS,),
)
#: Sends M-RoPE and XD-RoPE positions without a wait.
ROPE_POSITIONS = _feature("rope-positions", "inputs.rope_positions:RopePositions")
#: Fills input ids and drafts for the whole batch, with one upload.
INPUT_IDS = _feature("input-ids", "inputs.input_ids:InputIds")
#: Draws for all seeded requests in one launch, with torch's bits.
SEEDS = _feature("seeds", "sample.seeds:Seeds", device="gpu")
#: Computes the ranks of logprobs with a kernel that is not compiled while serving.
LOGPROB_RANKS = _feature("logprob-ranks", "sample.logprob_ranks:LogprobRanks", device="gpu")
#: Builds logprobs only for outputs that return them; decodes each token once.
LOGPROBS = _feature(
    "logprobs", "frontend.logprobs", "frontend.logprob_messages", "frontend.token_texts", on_v2=True
)
#: Processes the tokens of requests that continue in one pass; makes outputs when they are taken.
PROCESS_OUTPUTS = _feature(
    "process-outputs",
    "frontend.continuing",
    "frontend.histograms",
    "frontend.unread",
    on_v2=True,
)
#: Encodes what changes from chunk to chunk of a stream, and the rest once.
STREAMED_CHUNKS = _feature(
    "streamed-chunks",
    "frontend.chunks",
    "frontend.chunk_logprobs",
    "frontend.response_models",
    on_v2=True,
)
#: Schedules all running requests that need no new block at once.
SCHEDULE = _feature("schedule", "core.schedule", "core.bounds", on_v2=True)
#: Updates a request that continues by one token with a few operations.
UPDATE_OUTPUTS = _feature("update-outputs", "core.update_outputs", "core.bounds", on_v2=True)
#: Compiles all kernels that requests may need before the engine is ready.
WARM_UP = _feature("warm-up", "sample.warm_up:WarmUp", device="gpu")
#: Sends only the masks of rows with a grammar, without a wait.
GRAMMARS = _feature("grammars", "sample.grammars:Grammars", "core.grammar_masks", on_v2=True)

#: A request of a hybrid model reads its own count of accepted drafts.
ACCEPTED_COUNTS = _fix("accepted-counts", "inputs.accepted_counts:AcceptedCounts")
#: A request's allowed tokens do not restrict other requests.
ALLOWED_TOKENS = _fix("allowed-tokens", "sample.allowed_tokens:AllowedTokens")
#: Different inputs have different keys in the caches of KV and of multimodal items.
CACHE_KEYS = _fix("cache-keys", "core.cache_keys", "frontend.mm_hashes", on_v2=True)
#: A grammar restricts exactly the tokens between the reasoning and its own end.
CLOSED_GRAMMARS = _fix(
    "closed-grammars",
    "sample.closed_grammars:ClosedGrammars",
    "core.ended_grammars",
    "core.grammar_stops",
    "core.mask_rows",
    "core.reasoning_ends",
    "frontend.grammar_pipelines",
    before=(GRAMMARS,),
    on_v2=True,
)
#: The front end knows which multimodal items the engine core has.
MM_CACHES = _fix("mm-caches", "frontend.mm_caches", on_v2=True)
#: Memory is pinned only on platforms with pinned memory.
CPU_PINNING = _fix("cpu-pinning", "engine.pinning", device="cpu")
#: A prompt of one token begins with an empty recurrent state.
EMPTY_STATES = _fix("empty-states", "inputs.empty_states:EmptyStates")
#: A gated delta net computes each drafted token with the token's own gates.
DRAFT_GATES = _fix("draft-gates", "inputs.draft_gates")
#: A request near max_model_len does not stop the n-gram drafts of others.
DRAFT_LENGTHS = _fix("draft-lengths", "inputs.draft_lengths:DraftLengths")
#: Every data-parallel rank runs its drafter if any rank drafts.
DRAFTER_RANKS = _fix("drafter-ranks", "inputs.drafter_ranks:DrafterRanks")
#: Neither replies nor cached blocks are computed from a failed KV load.
FAILED_LOADS = _fix(
    "failed-loads", "core.failed_loads", "core.in_flight", "inputs.restarts:Restarts", on_v2=True
)
#: KV transfers and their requests may end in any order.
KV_TRANSFERS = _fix(
    "kv-transfers", "core.kv_transfers", "core.in_flight", "inputs.restarts:Restarts", on_v2=True
)
#: A request keeps its LoRA adapter while others are loaded, pinned, removed or scheduled.
LORA_SLOTS = _fix("lora-slots", "engine.lora_slots", "core.lora_limits", on_v2=True)
#: An engine's processes read messages whose notification was lost.
LOST_WAKEUPS = _fix("lost-wakeups", "engine.lost_wakeups", on_v2=True)
#: A request skipped by a step keeps no draft placeholders.
ORPHAN_DRAFTS = _fix("orphan-drafts", "core.orphan_drafts", on_v2=True)
#: Logits processors from entry points read every sampled token.
PLUGIN_PROCESSORS = _fix("plugin-processors", "sample.readers")
#: A grammar that fails to compile ends only its own request.
REFUSED_GRAMMARS = _fix("refused-grammars", "core.refused_grammars", on_v2=True)
#: A preempted request receives each in-flight token once and in order.
PREEMPTION = _fix("preemption", "core.preemption", on_v2=True)
#: A step's pinned inputs stay unchanged until the device has read them.
PINNED_INPUTS = _fix("pinned-inputs", "inputs.pinned_inputs", device="gpu")
#: The model reads the right token ids with prompt embeddings and in-flight drafts.
PROMPT_EMBEDS = _fix("prompt-embeds", "inputs.prompt_embeds:PromptEmbeds")
#: A row keeps no state of an earlier request.
ROW_STATE = _fix("row-state", "inputs.row_state:RowState")
#: A token that replaces a rejected draft is in the vocabulary.
RECOVERED_TOKENS = _fix("recovered-tokens", "sample.recovered_tokens")
#: min_tokens ignores stop tokens outside the vocabulary.
STOP_TOKENS = _fix("stop-tokens", "sample.stop_tokens:StopTokens")
#: A reply ends with the token that completes its first stop string.
STOP_STRINGS = _fix("stop-strings", "frontend.stop_strings", on_v2=True)
#: On the CPU, seeds work with chunked prefill and in mixed batches.
CPU_SEEDS = _fix("cpu-seeds", "sample.cpu_seeds:CpuSeeds", device="cpu")
#: On the CPU, drafts are sampled with their request's parameters.
CPU_DRAFTS = _fix("cpu-drafts", "sample.cpu_drafts", device="cpu")
#: A hybrid model's row without drafts continues from its own state.
UNDRAFTED_ROWS = _fix("undrafted-rows", "inputs.undrafted_rows:UndraftedRows")
#: logprobs_mode applies to prompt logprobs.
PROMPT_LOGITS = _fix("prompt-logits", "sample.prompt_logits:PromptLogits")
#: Prompt logprobs take a bounded amount of memory.
PROMPT_CHUNKS = _fix("prompt-chunks", "sample.prompt_chunks:PromptChunks")
#: Prompt positions that were not computed have no logprobs.
CACHED_PROMPT_LOGPROBS = _fix(
    "cached-prompt-logprobs", "frontend.cached_prompt_logprobs:CachedPromptLogprobs", on_v2=True
)
#: No prefill chunk of a hybrid model runs in the CUDA graph of uniform decodes.
UNIFORM_DECODE = _fix("uniform-decode", "inputs.uniform_decode:UniformDecode", device="gpu")
#: logprob_token_ids of a request do not change other requests' logprobs.
LOGPROB_TOKENS = _fix("logprob-tokens", "sample.logprob_tokens")
#: With drafts, Mamba blocks match the tokens that are computed.
MAMBA_BLOCKS = _fix("mamba-blocks", "core.mamba_blocks", on_v2=True)
#: A sliding window keeps blocks that it needs if drafts are rejected.
WINDOW_BLOCKS = _fix("window-blocks", "core.window_blocks", on_v2=True)
#: Lists of new block ids do not grow without limit.
BLOCK_IDS = _fix("block-ids", "core.block_ids", on_v2=True)
#: A request that the engine cannot serve is refused, without harm to others.
BAD_REQUESTS = _fix(
    "bad-requests",
    "frontend.bad_requests",
    "frontend.grammar_bounds",
    "frontend.request_types",
    "frontend.unchecked_requests",
    on_v2=True,
)
#: Each request is served or refused, and stalls no other.
STALLED_REQUESTS = _fix("stalled-requests", "core.stalled_requests", on_v2=True)
#: An aborted request with several sequences leaves no state behind.
ABORTED_PARENTS = _fix("aborted-parents", "frontend.aborted_parents", on_v2=True)
#: A thinking budget applies only to its own request.
THINKING_ROWS = _fix(
    "thinking-rows", "sample.thinking_fixes:ThinkingFixes", before=(THINKING_BUDGET,)
)
#: A thinking budget applies to every thinking section.
THINKING_SECTIONS = _fix(
    "thinking-sections",
    "sample.thinking_fixes:ThinkingFixes",
    needs=(THINKING_ROWS,),
    before=(THINKING_BUDGET,),
)
#: A thinking budget of -1 never ends the thinking.
THINKING_UNLIMITED = _fix(
    "thinking-unlimited", "sample.thinking_fixes:ThinkingFixes", before=(THINKING_BUDGET,)
)
#: Each turn of a streaming session begins at the end of the previous answer, and has its own end.
SESSIONS = _fix("sessions", "core.sessions", "frontend.turns", on_v2=True)
#: No latency is computed from an event that did not happen.
REQUEST_TIMES = _fix("request-times", "frontend.request_times", "core.request_times", on_v2=True)

#: Name to declaration, features first.
WORDS: Mapping[str, Word] = MappingProxyType(
    {word: word for word in tuple(vars().values()) if isinstance(word, Word)}
)
FEATURES: Mapping[str, Word] = MappingProxyType({w: w for w in WORDS.values() if not w.is_fix})
FIXES: Mapping[str, Word] = MappingProxyType({w: w for w in WORDS.values() if w.is_fix})
#: Group to its members.
GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"features": frozenset(FEATURES), "fixes": frozenset(FIXES)}
)
ALL = frozenset(WORDS)
#: Words of earlier versions, and what takes their place.
REMOVED: Mapping[str, str] = MappingProxyType(
    {"grammar-limits": "bad-requests bounds grammars by their text"}
)
#: Words that work under Model Runner V2. Of ``grammars``, only the mask filling does.
ON_V2 = frozenset(word for word in WORDS.values() if word.on_v2)


def with_needs(names: Iterable[str]) -> frozenset[str]:
    """Return ``names`` and the words that they depend on."""
    names = frozenset(names)
    return names.union(*(WORDS[name].needs for name in names))


def without(names: Iterable[str], on: frozenset[str]) -> frozenset[str]:
    """Return ``on`` without ``names`` and their dependents."""
    left, gone = on - frozenset(names), frozenset(names)
    while gone:
        gone = frozenset(name for name in left if not left.issuperset(WORDS[name].needs))
        left -= gone
    return left


def classes(on: Iterable[str]) -> Iterator[type[Any]]:
    """Import and yield a live batch's classes for enabled words, sorted by needs and before."""
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
