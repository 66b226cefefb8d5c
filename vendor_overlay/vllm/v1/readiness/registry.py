"""Registry: every word of VLLM_READINESS, declared once.

A *feature* keeps the outputs of stock vLLM, bit for bit. A *fix* changes only wrong outputs. The
switch, the live batch, the overlay tool, the review and the documentation's tests read the words
here. The ``Serves:`` line of a patch names the words that need the patch.

The module imports nothing of vLLM, because the overlay tool executes it without vLLM.
"""

# mirrors: nothing

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType


class Word(str):
    """Name of a feature or fix in VLLM_READINESS, in lower case with dashes.

    Attributes:
        is_fix: whether the word may change outputs.
        needs: words that this word depends on. If any of them is off, this word is off.
        device: ``cpu`` or ``gpu`` if the word takes effect only there; else empty.
        on_v2: whether the word works under Model Runner V2, through seams in V2's files, the
            scheduler or the front end that work without its other seams.
    """

    is_fix: bool
    needs: tuple["Word", ...]
    device: str
    on_v2: bool

    def __new__(
        cls,
        name: str,
        *,
        is_fix: bool,
        needs: tuple["Word", ...] = (),
        device: str = "",
        on_v2: bool = False,
    ) -> "Word":
        """Create the string."""
        word = super().__new__(cls, name)
        word.is_fix, word.needs, word.device, word.on_v2 = is_fix, needs, device, on_v2
        return word

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle as a plain string."""
        return str, (str(self),)


_feature = partial(Word, is_fix=False)
_fix = partial(Word, is_fix=True)

#: Writes sampled tokens into token_ids_cpu as they arrive; each wait has an owner.
HISTORY = _feature("history")
#: Copies outputs to the host with one pinned copy and one event per step.
READBACK = _feature("readback", device="gpu")
#: Searches only new tokens for markers; waits only if a token may be forced.
THINKING_BUDGET = _feature("thinking-budget", needs=(HISTORY,))
#: Applies penalties from counts on the device, at a cost independent of output length.
PENALTIES = _feature("penalties", needs=(HISTORY,))
#: Matches and masks bad words on the device, without a wait.
BAD_WORDS = _feature("bad-words", needs=(HISTORY,))
#: Copies and converts logits only if a consumer changes them.
SAMPLER_COPIES = _feature("sampler-copies", on_v2=True)
#: Updates a step's requests and inputs for the whole batch, with one upload.
STEP_INPUTS = _feature("step-inputs")
#: Sends only changed block ids; computes no unused slot mappings.
BLOCK_TABLES = _feature("block-tables")
#: Sends M-RoPE and XD-RoPE positions without a wait.
ROPE_POSITIONS = _feature("rope-positions")
#: Learns on the host whether prompts of Mamba 2 continue from a state.
MAMBA_METADATA = _feature("mamba-metadata")
#: Repeats a step's launches of Mamba layers without Triton's and torch's own work.
MAMBA_LAUNCHES = _feature("mamba-launches", device="gpu")
#: Fills input ids and drafts, and drops rejected ones, for the whole batch.
INPUT_IDS = _feature("input-ids")
#: Draws for all seeded requests in one launch, with torch's bits.
SEEDS = _feature("seeds", device="gpu")
#: Computes the ranks of logprobs with a kernel that is not compiled while serving.
LOGPROB_RANKS = _feature("logprob-ranks", device="gpu")
#: Builds logprobs only for outputs that return them; decodes each token once.
LOGPROBS = _feature("logprobs", on_v2=True)
#: Processes the tokens of requests that continue in one pass; makes outputs when they are taken.
PROCESS_OUTPUTS = _feature("process-outputs", on_v2=True)
#: Encodes what changes from chunk to chunk of a stream, and the rest once.
STREAMED_CHUNKS = _feature("streamed-chunks", on_v2=True)
#: Schedules all running requests that need no new block at once.
SCHEDULE = _feature("schedule", on_v2=True)
#: Updates a request that continues with a few operations.
UPDATE_OUTPUTS = _feature("update-outputs", on_v2=True)
#: Compiles all kernels that requests may need before the engine is ready.
WARM_UP = _feature("warm-up", device="gpu")
#: Sends only the masks of rows with a grammar, without a wait.
GRAMMARS = _feature("grammars", on_v2=True)

#: A request of a hybrid model reads its own count of accepted drafts.
ACCEPTED_COUNTS = _fix("accepted-counts")
#: A request's allowed tokens do not restrict other requests.
ALLOWED_TOKENS = _fix("allowed-tokens")
#: Different inputs have different keys in the caches of KV and of multimodal items.
CACHE_KEYS = _fix("cache-keys", on_v2=True)
#: A grammar restricts exactly the tokens between the reasoning and its own end.
CLOSED_GRAMMARS = _fix("closed-grammars", on_v2=True)
#: The front end knows which multimodal items the engine core has.
MM_CACHES = _fix("mm-caches", on_v2=True)
#: Memory is pinned only on platforms with pinned memory.
CPU_PINNING = _fix("cpu-pinning", device="cpu")
#: A prompt of one token begins with an empty recurrent state.
EMPTY_STATES = _fix("empty-states")
#: A gated delta net computes each drafted token with the token's own gates.
DRAFT_GATES = _fix("draft-gates")
#: A request near max_model_len does not stop the n-gram drafts of others.
DRAFT_LENGTHS = _fix("draft-lengths")
#: Every data-parallel rank runs its drafter if any rank drafts.
DRAFTER_RANKS = _fix("drafter-ranks")
#: Neither replies nor cached blocks are computed from a failed KV load.
FAILED_LOADS = _fix("failed-loads", on_v2=True)
#: KV transfers and their requests may end in any order.
KV_TRANSFERS = _fix("kv-transfers", on_v2=True)
#: A request keeps its LoRA adapter while others are loaded, pinned, removed or scheduled.
LORA_SLOTS = _fix("lora-slots", on_v2=True)
#: An engine's processes read messages whose notification was lost.
LOST_WAKEUPS = _fix("lost-wakeups", on_v2=True)
#: A request skipped by a step keeps no draft placeholders.
ORPHAN_DRAFTS = _fix("orphan-drafts", on_v2=True)
#: Logits processors from entry points read every sampled token.
PLUGIN_PROCESSORS = _fix("plugin-processors")
#: A grammar that fails to compile ends only its own request.
REFUSED_GRAMMARS = _fix("refused-grammars", on_v2=True)
#: A preempted request receives each in-flight token once and in order.
PREEMPTION = _fix("preemption", on_v2=True)
#: A step's pinned inputs stay unchanged until the device has read them.
PINNED_INPUTS = _fix("pinned-inputs", device="gpu")
#: The model reads the right token ids with prompt embeddings and in-flight drafts.
PROMPT_EMBEDS = _fix("prompt-embeds")
#: A row keeps no state of an earlier request.
ROW_STATE = _fix("row-state")
#: A token that replaces a rejected draft is in the vocabulary.
RECOVERED_TOKENS = _fix("recovered-tokens")
#: min_tokens ignores stop tokens outside the vocabulary.
STOP_TOKENS = _fix("stop-tokens")
#: A reply ends with the token that completes its first stop string.
STOP_STRINGS = _fix("stop-strings", on_v2=True)
#: On the CPU, seeds work with chunked prefill and in mixed batches.
CPU_SEEDS = _fix("cpu-seeds", device="cpu")
#: On the CPU, drafts are sampled with their request's parameters.
CPU_DRAFTS = _fix("cpu-drafts", device="cpu")
#: A hybrid model's row without drafts continues from its own state.
UNDRAFTED_ROWS = _fix("undrafted-rows")
#: logprobs_mode applies to prompt logprobs.
PROMPT_LOGITS = _fix("prompt-logits")
#: Prompt logprobs take a bounded amount of memory.
PROMPT_CHUNKS = _fix("prompt-chunks")
#: Prompt positions that were not computed have no logprobs.
CACHED_PROMPT_LOGPROBS = _fix("cached-prompt-logprobs", on_v2=True)
#: No prefill chunk of a hybrid model runs in the CUDA graph of uniform decodes.
UNIFORM_DECODE = _fix("uniform-decode", device="gpu")
#: logprob_token_ids of a request do not change other requests' logprobs.
LOGPROB_TOKENS = _fix("logprob-tokens")
#: With drafts, Mamba blocks match the tokens that are computed.
MAMBA_BLOCKS = _fix("mamba-blocks", on_v2=True)
#: A sliding window keeps blocks that it needs if drafts are rejected.
WINDOW_BLOCKS = _fix("window-blocks", on_v2=True)
#: Lists of new block ids do not grow without limit.
BLOCK_IDS = _fix("block-ids", on_v2=True)
#: A request that the engine cannot serve is refused, without harm to others.
BAD_REQUESTS = _fix("bad-requests", on_v2=True)
#: Each request is served or refused, and stalls no other.
STALLED_REQUESTS = _fix("stalled-requests", on_v2=True)
#: An aborted request with several sequences leaves no state behind.
ABORTED_PARENTS = _fix("aborted-parents", on_v2=True)
#: A thinking budget applies only to its own request.
THINKING_ROWS = _fix("thinking-rows")
#: A thinking budget applies to every thinking section.
THINKING_SECTIONS = _fix("thinking-sections", needs=(THINKING_ROWS,))
#: A thinking budget of -1 never ends the thinking.
THINKING_UNLIMITED = _fix("thinking-unlimited")
#: Each turn of a streaming session begins at the end of the previous answer, and has its own end.
SESSIONS = _fix("sessions", on_v2=True)
#: No latency is computed from an event that did not happen.
REQUEST_TIMES = _fix("request-times", on_v2=True)

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
#: Words that serve the batch of a pooling model, which samples nothing.
POOLING = frozenset({ACCEPTED_COUNTS, BLOCK_TABLES, CPU_SEEDS, READBACK, ROW_STATE, WARM_UP})


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
