"""Steps of a scheduler whose KV connector fails, over a worker with a KV cache.

The worker's KV cache holds, for each position of a block, the tokens that it was computed from. A
load that fails leaves nothing that could be right. A token is right only if all KV before it is.
"""

from random import Random
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from support.scheduling import BLOCK
from support.steps import WRONG, Steps, token


def prompt(count: int, first: int = -1) -> list[int]:
    """Return the first tokens of a prompt; prompts with another first token share no block."""
    return [first] + [-2 - place for place in range(count - 1)]


class Connector:
    """The scheduler's side: claims tokens of requests that ask for it.

    Attributes:
        loads: blocks to be loaded by the next step, each with the tokens up to its end.
        waiting: requests whose loads are asynchronous, and what they load.
        claims: by request, the most blocks that it loads, and whether asynchronously.
    """

    def __init__(self) -> None:
        self.loads: list[tuple[int, tuple[int, ...]]] = []
        self.received: list[str] = []
        self.claims: dict[str, tuple[int, bool]] = {}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Claim tokens."""
        most, later = self.claims[request.request_id]
        count = min(most, (request.num_tokens - 1) // BLOCK) * BLOCK - computed
        if count <= 0:
            return 0, False
        return count, later

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        """Note the blocks to load."""
        if not count:
            return
        (ids,), tokens = blocks.get_block_ids(), list(request.all_token_ids)
        end = min(self.claims[request.request_id][0], (len(tokens) - 1) // BLOCK)
        for place in range(end - count // BLOCK, end):
            self.loads.append((ids[place], tuple(tokens[: BLOCK * (place + 1)])))
        if self.claims[request.request_id][1]:
            self.received.append(request.request_id)

    def build_connector_meta(self, step: Any) -> Any:
        """Return the step's loads, and the requests that have what they asked for when it ends."""
        meta = self.loads, self.received
        self.loads, self.received = [], []
        return meta

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        """Let the blocks go."""
        return False, None

    def on_new_request(self, request: Any) -> None:
        """Do nothing."""

    def update_connector_output(self, output: Any) -> None:
        """Do nothing."""

    def take_events(self) -> tuple[()]:
        """Return no events."""
        return ()


class Loads(Steps):
    """An engine's loop with a connector.

    Args:
        scheduler: the scheduler, with prefix caching or without.
        in_flight: most steps in flight.
        seed: of which loads fail and which drafts are accepted.
        failing: how many of a hundred blocks fail.
    """

    def __init__(self, scheduler: Any, in_flight: int, seed: int, failing: int = 40) -> None:
        self.chance = Random(seed)
        super().__init__(scheduler, in_flight, lambda most: self.chance.randint(0, most))
        self.failing = failing
        self.connector = scheduler.connector = Connector()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        #: By block, what its positions were computed from.
        self.cache: dict[int, dict[int, tuple[int, ...]]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.failed = 0

    def load(self, prompt: list[int], max_tokens: int, most: int, later: bool = False) -> str:
        """Add a request for which up to ``most`` blocks are claimed."""
        self.connector.claims[str(len(self.added) + 1)] = most, later
        return self.add(prompt, max_tokens)

    def _run(self, scheduled: Any) -> ModelRunnerOutput:
        invalid = set()
        loads, received = scheduled.kv_connector_metadata
        for block, tokens in loads:
            start = len(tokens) - BLOCK
            self.cache[block] = {n: tokens[: start + n + 1] for n in range(BLOCK)}
            if self.chance.randrange(100) < self.failing:
                self.cache[block] = {}
                invalid.add(block)
        self.failed += len(invalid)
        for new in scheduled.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.blocks[name] = []
            self.blocks[name].extend(*(blocks or ([],)))
        output = super()._run(scheduled)
        output.kv_connector_output = KVConnectorOutput(
            finished_recving=set(received), invalid_block_ids=invalid
        )
        return output

    def _sample(self, name: str, computed: int, scheduled: Any, drafts: int) -> list[int]:
        known = self._tokens[name]
        end = computed + scheduled.num_scheduled_tokens[name] - drafts
        self._compute(name, known, computed, min(end, len(known)))
        tokens = super()._sample(name, computed, scheduled, drafts)
        if not tokens:
            return tokens
        if not self._right(name, known, len(known)):
            tokens = [WRONG]
        self._compute(name, known + tokens[:-1], len(known), len(known) + len(tokens) - 1)
        return tokens

    def _right(self, name: str, tokens: list[int], end: int) -> bool:
        return all(
            self._at(name, place).get(place % BLOCK) == tuple(tokens[: place + 1])
            for place in range(end)
        )

    def _compute(self, name: str, tokens: list[int], start: int, end: int) -> None:
        right = self._right(name, tokens, start)
        for place in range(start, end):
            computed = tuple(tokens[: place + 1]) if right else (WRONG,)
            self._at(name, place)[place % BLOCK] = computed

    def _at(self, name: str, place: int) -> dict[int, tuple[int, ...]]:
        return self.cache.setdefault(self.blocks[name][place // BLOCK], {})

    def right(self, name: str) -> list[int]:
        """Return the tokens that a request should be given."""
        return [token(name, place) for place in range(self.added[name])]
