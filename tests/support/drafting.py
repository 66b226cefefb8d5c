"""A scheduler's loop with drafts: a scripted model, and a drafter that knows the script.

The worker is simulated: it samples the script's token at each position if the bitmask allows it,
or the first allowed one, and accepts drafts as long as they are sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from support import grammars
from support.scheduling import VOCABULARY

#: Drafts for a request that has generated this many tokens.
Drafter = Callable[[str, int], list[int]]


@dataclass
class Worker:
    """Samples for requests by their scripts.

    Attributes:
        scripts: request to its favourite token at each position.
        generated: request to its tokens so far.
    """

    scripts: Mapping[str, Sequence[int]]
    generated: dict[str, list[int]] = field(default_factory=dict)

    def sample(
        self, scheduled: Any, masks: Any, drafts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Return the tokens that a step samples for each request.

        Args:
            scheduled: the step.
            masks: the step's GrammarOutput; None for no bitmasks.
            drafts: the drafts that the worker has for each request.
        """
        rows: dict[str, Any] = {}
        if masks is not None:
            row = 0
            for name in masks.structured_output_request_ids:
                count = 1 + len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
                rows[name] = masks.grammar_bitmask[row : row + count]
                row += count
        sampled = {}
        for name in scheduled.num_scheduled_tokens:
            own = drafts.get(name, ())
            tokens: list[int] = []
            for place in range(1 + len(own)):
                known = self.generated.setdefault(name, [])
                tokens.append(self._choose(name, len(known), rows.get(name), place))
                known.append(tokens[-1])
                if place < len(own) and own[place] != tokens[-1]:
                    break
            sampled[name] = tokens
        return sampled

    def _choose(self, name: str, position: int, rows: Any, place: int) -> int:
        script = self.scripts[name]
        favourites = [script[position % len(script)], *range(1, VOCABULARY)]
        return next((token for token in favourites if _allowed(rows, place, token)), 0)


def _allowed(rows: Any, place: int, token: int) -> bool:
    return rows is None or bool(int(rows[place][token // 32]) >> (token % 32) & 1)


def run(
    scheduler: Any, worker: Worker, drafter: Drafter, asynchronous: bool, steps: int = 60
) -> dict[str, tuple[list[int], str | None]]:
    """Step a scheduler until its requests have ended; request to its tokens and finish reason.

    Args:
        scheduler: with its requests, of short prompts.
        worker: samples.
        drafter: see :data:`Drafter`.
        asynchronous: whether a step is scheduled before the previous one's output arrives.
        steps: the most steps.
    """
    results: dict[str, tuple[list[int], str | None]] = {name: ([], None) for name in worker.scripts}
    drafts: dict[str, list[int]] = {}
    flying: list[tuple[Any, Any]] = []
    drafted = scheduler.num_spec_tokens > 0

    def receive() -> None:
        scheduled, output = flying.pop()
        grammars.receive(results, scheduler.update_from_output(scheduled, output)[0].outputs)

    for _ in range(steps):
        scheduled = scheduler.schedule()
        if not scheduled.num_scheduled_tokens:
            if not flying:
                break
            receive()
            continue
        placed = scheduled.scheduled_spec_decode_tokens
        if flying:
            receive()
            if drafted:
                scheduler.update_draft_token_ids_in_output(_proposed(drafts), scheduled)
        own = {name: drafts[name][: len(placed[name])] for name in placed}
        sampled = worker.sample(scheduled, scheduler.get_grammar_bitmask(scheduled), own)
        drafts = {name: drafter(name, len(worker.generated[name])) for name in sampled}
        flying.append((scheduled, grammars.output_of(scheduled, sampled)))
        if not asynchronous:
            receive()
            if drafted:
                scheduler.update_draft_token_ids(_proposed(drafts))
    return results


def _proposed(drafts: Mapping[str, Sequence[int]]) -> DraftTokenIds:
    return DraftTokenIds([*drafts], [[*own] for own in drafts.values()])
