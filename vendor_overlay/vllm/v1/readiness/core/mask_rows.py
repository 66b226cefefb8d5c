"""Fix ``closed-grammars``, trimmed drafts: each row of the logits gets its own bitmask.

The scheduler sends one bitmask per scheduled draft of a request, and one more. With ``ngram_gpu``
the worker then trims the drafts that its drafter did not find. 0.22.0 counts the bitmasks by the
trimmed drafts, so requests behind the first trimmed one get bitmasks of other positions or of other
requests: illegal tokens are accepted, and their requests end with an error. Here the scheduler
sends the number of each request's bitmasks, and the worker skips those of trimmed drafts.
(https://github.com/vllm-project/vllm/issues/49694)
"""

# mirrors: vllm.v1.structured_output.utils:apply_grammar_bitmask
# mirrors: vllm.v1.spec_decode.ngram_proposer_gpu:update_scheduler_for_invalid_drafts

from itertools import accumulate
from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


def counted(
    scheduler: "Scheduler", step: "SchedulerOutput", output: "GrammarOutput"
) -> "GrammarOutput":
    """Return ``output``, with the number of bitmasks per request if the worker may trim drafts."""
    config = scheduler.vllm_config.speculative_config
    if config is None or not config.use_ngram_gpu():
        return output
    if registry.CLOSED_GRAMMARS in switch.enabled():
        output.readiness = _counts(step, output)
    return output


def match(step: "SchedulerOutput", output: "GrammarOutput") -> None:
    """Leave only the bitmasks of positions in the worker's trimmed step in ``output``."""
    sent: list[int] | None = vars(output).pop(subclasses.ATTRIBUTE, None)
    if sent is None or (left := _counts(step, output)) == sent:
        return
    rows: list[int] = []
    for end, count, kept in zip(accumulate(sent), sent, left, strict=True):
        begin = end - count
        rows += range(begin, begin + min(count, kept))
    output.grammar_bitmask = output.grammar_bitmask[rows]


def _counts(step: "SchedulerOutput", output: "GrammarOutput") -> list[int]:
    """Return the number of positions with a bitmask of each request."""
    drafts = step.scheduled_spec_decode_tokens
    return [1 + len(drafts.get(name, ())) for name in output.structured_output_request_ids]
