"""Features and fixes: the words that VLLM_READINESS accepts, and the two groups they are in.

A feature gives the outputs that stock gives, bit for bit. A fix changes outputs only where
stock's are wrong.
"""

# mirrors: nothing

from collections.abc import Iterable, Mapping
from types import MappingProxyType

HISTORY = "history"
READBACK = "readback"
THINKING_BUDGET = "thinking-budget"
PENALTIES = "penalties"
BAD_WORDS = "bad-words"
SAMPLER_COPIES = "sampler-copies"
STEP_INPUTS = "step-inputs"
BLOCK_TABLES = "block-tables"
ROPE_POSITIONS = "rope-positions"
INPUT_IDS = "input-ids"
SEEDS = "seeds"
LOGPROBS = "logprobs"
GRAMMARS = "grammars"
ACCEPTED_COUNTS = "accepted-counts"
ALLOWED_TOKENS = "allowed-tokens"
CLOSED_GRAMMARS = "closed-grammars"
CPU_PINNING = "cpu-pinning"
EMPTY_STATES = "empty-states"
FAILED_LOADS = "failed-loads"
DRAFTER_RANKS = "drafter-ranks"
LOST_WAKEUPS = "lost-wakeups"
ORPHAN_DRAFTS = "orphan-drafts"
PLUGIN_PROCESSORS = "plugin-processors"
REFUSED_GRAMMARS = "refused-grammars"
GRAMMAR_LIMITS = "grammar-limits"
PREEMPTION = "preemption"
PINNED_INPUTS = "pinned-inputs"
PROMPT_EMBEDS = "prompt-embeds"
ROW_STATE = "row-state"
RECOVERED_TOKENS = "recovered-tokens"
STOP_TOKENS = "stop-tokens"
CPU_SEEDS = "cpu-seeds"
CPU_DRAFTS = "cpu-drafts"
PROMPT_LOGITS = "prompt-logits"
CACHED_PROMPT_LOGPROBS = "cached-prompt-logprobs"
UNIFORM_DECODE = "uniform-decode"
UNDRAFTED_ROWS = "undrafted-rows"
LOGPROB_TOKENS = "logprob-tokens"
WINDOW_BLOCKS = "window-blocks"
BLOCK_IDS = "block-ids"
BAD_REQUESTS = "bad-requests"
THINKING_ROWS = "thinking-rows"
THINKING_SECTIONS = "thinking-sections"
THINKING_UNLIMITED = "thinking-unlimited"
SESSIONS = "sessions"

#: Feature to one line on what it does. A name is lower-case with dashes.
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        HISTORY: "token_ids_cpu holds each sampled token that has arrived; waits only by name",
        READBACK: "outputs come by one pinned copy and its event; no blocking copy",
        THINKING_BUDGET: "markers searched in new tokens only; waits where a force may be due",
        PENALTIES: "penalties from counts on the device; no cost grows with the output",
        BAD_WORDS: "bad words matched and masked on the device; nothing waits",
        SAMPLER_COPIES: "logits are copied and converted only where something changes them",
        STEP_INPUTS: "decode steps of an unchanged batch are advanced in place",
        BLOCK_TABLES: "a step sends the block ids that have changed, and maps no slots in vain",
        ROPE_POSITIONS: "positions of several dimensions are sent without a wait",
        INPUT_IDS: "input ids and drafts are placed for the whole batch, with one upload",
        SEEDS: "all requests with a seed are drawn by one launch, with torch's bits",
        LOGPROBS: "logprobs are made for the output that shows them; tokens decoded once",
        GRAMMARS: "masks of rows with a grammar alone are sent, and nothing waits",
    }
)

#: Fix to one line on what it mends.
FIXES: Mapping[str, str] = MappingProxyType(
    {
        ACCEPTED_COUNTS: "a request of a hybrid model reads its own count of accepted drafts",
        ALLOWED_TOKENS: "a request's allowed tokens bind no other request",
        CLOSED_GRAMMARS: "a complete grammar ends its request before min_tokens, without an error",
        CPU_PINNING: "memory is pinned only where the platform has pinned memory",
        EMPTY_STATES: "a prompt of one token begins with an empty recurrent state",
        DRAFTER_RANKS: "a data-parallel rank that does not draft runs its drafter for the others",
        FAILED_LOADS: "no reply, and no block of the prefix cache, is made from a failed KV load",
        LOST_WAKEUPS: "an engine's processes read messages whose announcement was lost",
        ORPHAN_DRAFTS: "a request left out of a step keeps no placeholders of drafts",
        PLUGIN_PROCESSORS: "a logits processor from an entry point reads each sampled token",
        REFUSED_GRAMMARS: "a grammar that cannot be compiled ends its own request alone",
        GRAMMAR_LIMITS: "a grammar that takes too much time or memory is refused",
        PREEMPTION: "a preempted request is given each token in flight once and in order",
        PINNED_INPUTS: "a step's pinned inputs stay until the device has read them",
        PROMPT_EMBEDS: "with drafts in flight, a prompt of embeddings may share the server",
        ROW_STATE: "a request finds no other request's state in its row",
        RECOVERED_TOKENS: "a token that replaces a draft is in the vocabulary",
        STOP_TOKENS: "stop tokens outside the vocabulary do not take part in min_tokens",
        CPU_SEEDS: "on the CPU, a seed decides its request's tokens, in chunks and beside others",
        CPU_DRAFTS: "on the CPU, drafts are sampled with their request's parameters",
        UNDRAFTED_ROWS: "a hybrid model's row without drafts continues from its own state",
        PROMPT_LOGITS: "logprobs_mode applies to the logprobs of prompts",
        CACHED_PROMPT_LOGPROBS: "positions of a prompt that were not computed have no logprobs",
        UNIFORM_DECODE: "no prompt of a hybrid model takes the CUDA graph of decodes",
        LOGPROB_TOKENS: "a request that names tokens for logprobs leaves others theirs",
        WINDOW_BLOCKS: "a window's blocks stay its request's while drafts may be rejected",
        BLOCK_IDS: "no list of block ids grows for as long as the engine runs",
        BAD_REQUESTS: "a request that the engine cannot serve is refused, and harms no other",
        THINKING_ROWS: "a thinking budget stays with its own request",
        THINKING_SECTIONS: "a thinking budget holds for each section of thinking",
        THINKING_UNLIMITED: "a thinking budget of -1 never ends the thinking",
        SESSIONS: "a streaming session's turns begin where the one before has ended",
    }
)

#: Group to its members.
GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"features": frozenset(FEATURES), "fixes": frozenset(FIXES)}
)

ALL = frozenset().union(*GROUPS.values())

#: The features and fixes that act under Model Runner V2: their seams, or a part of them that acts
#: alone, are in its own files, in the scheduler or in the front end. Of ``grammars`` it is the
#: filling of masks. All others act under V1 alone.
ON_V2 = frozenset(
    {
        SAMPLER_COPIES,
        LOGPROBS,
        GRAMMARS,
        BAD_REQUESTS,
        BLOCK_IDS,
        CACHED_PROMPT_LOGPROBS,
        FAILED_LOADS,
        GRAMMAR_LIMITS,
        LOST_WAKEUPS,
        ORPHAN_DRAFTS,
        PREEMPTION,
        REFUSED_GRAMMARS,
        SESSIONS,
        WINDOW_BLOCKS,
    }
)

#: Feature or fix to those that it builds on: off with them.
NEEDS: Mapping[str, frozenset[str]] = MappingProxyType(
    dict.fromkeys((PENALTIES, BAD_WORDS, THINKING_BUDGET), frozenset({HISTORY}))
    | {THINKING_SECTIONS: frozenset({THINKING_ROWS})}
)


def with_needs(names: Iterable[str]) -> frozenset[str]:
    """These features and fixes, and those that they build on."""
    names = frozenset(names)
    return names.union(*(NEEDS.get(name, frozenset()) for name in names))


def without(names: Iterable[str], on: frozenset[str]) -> frozenset[str]:
    """What is left of ``on`` when these are off: their dependents go with them."""
    left = on - frozenset(names)
    return frozenset(name for name in left if NEEDS.get(name, frozenset()) <= left)
