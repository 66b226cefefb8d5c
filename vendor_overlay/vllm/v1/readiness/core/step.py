"""The step of V1's scheduler: features and fixes of the engine core, in the order of a step.

Each scheduler has one :class:`SchedulerStep`, its attribute ``readiness``. It owns all state that
the overlay keeps of a scheduler, as named attributes, which the seams call: each seam stands where
its patch needs it, and can be left out alone. State of a request is in :mod:`~.core.records`.

**The path of a request** through a step. Upstream's functions are those of ``scheduler``, unless
their file is named; modules without an attribute here keep no state. Under async scheduling, 2 to 5
have scheduled step *n* + 1, which counts the tokens of step *n* as placeholders, before these pass
7 to 9.

1. ``add_request`` calls :meth:`StalledRequests.refuses`, which ends a request that cannot be
   served.
2. ``schedule`` calls :meth:`FailedLoads.preempt` and :meth:`Running.begin`. Then
   :meth:`Running.advance` schedules the running requests that continue, with their drafts, and with
   blocks of :meth:`Cache.allocate` for those that need some, and upstream's loop the others. A
   request waits in it if :meth:`LoraLimits.waits` leaves it out.
3. Waiting requests are admitted unless :meth:`Preemption.awaits_steps`. One waits for its grammar
   by :meth:`RefusedGrammars.waits`, and loads KV unless :meth:`FailedLoads.refused`.
4. :meth:`Running.cached_data` writes the worker's message, with the ids of new blocks, which
   reaches the worker's ``_update_states`` (:mod:`~.live`, from 6).
   :meth:`KVTransfers.scheduled` and, in a synchronous pipeline, :meth:`Preemption.scheduled` add
   the step to :class:`InFlight`, and :meth:`StalledRequests.scheduled` looks for a request that
   stalls all others.
5. In ``_update_after_schedule``, :meth:`FailedLoads.scheduled` and :meth:`Sessions.scheduled` keep
   the step. :meth:`Running.advance_counts` advances the counts of requests that continue, and under
   async scheduling adds their placeholders; upstream does so for the others
   (``async_scheduler.py``: :meth:`Running.placeholders_to_add`). :meth:`StepsInFlight.schedule`,
   which calls ``schedule``, then adds the step to :class:`InFlight`.
6. ``get_grammar_bitmask`` fills masks (:mod:`~.core.reasoning_ends`, :mod:`~.core.grammar_masks`)
   and counts them for the worker (:mod:`~.core.mask_rows`). The worker's part is in :mod:`~.live`.
7. ``update_from_output`` gets the tokens, under async scheduling from
   :meth:`StepsInFlight.update_from_output`. That calls :meth:`InFlight.arrive` to remove results
   that are dropped; in a synchronous pipeline :meth:`Preemption.arrive` does so.
   :meth:`FailedLoads.arrive` and :meth:`KVTransfers.arrive` remove others;
   :meth:`FailedLoads.handle` finds the requests that used KV that failed to load.
8. :meth:`UpdateOutputs.serve` appends the tokens of each request that continues, and upstream's
   loop the others' (:mod:`~.core.grammar_stops`, :mod:`~.core.reasoning_ends`). Where a request
   ends, :meth:`Sessions.hold` keeps a session, and :meth:`KVTransfers.free` its blocks.
9. :meth:`Sessions.resume` begins the turns that waited for this step.
   :meth:`RefusedGrammars.finish` and :meth:`StalledRequests.finish` end requests. The outputs go to
   the front end (:mod:`~.frontend.step`, from 2). ``core.py`` packs their logprobs, and the decoder
   of ``core_client.py`` unpacks them (:mod:`~.frontend.logprob_messages`).
"""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.core import (
    failed_loads,
    in_flight,
    kv_transfers,
    lora_limits,
    preemption,
    refused_grammars,
    schedule,
    sessions,
    stalled_requests,
    update_outputs,
)
from vllm.v1.readiness.engine import subclasses

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def of(scheduler: "Scheduler") -> "SchedulerStep":
    """Return the step of a scheduler, made on first use: its class may skip any constructor."""
    return subclasses.remembered(scheduler, lambda: SchedulerStep(scheduler))


class SchedulerStep:
    """Features and fixes of one scheduler, in the order in which a step first calls them.

    Each decides when it is first called whether it is on. Until then, it reads nothing of the
    scheduler, which may lack attributes.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        # Requests arrive
        self.stalled_requests = stalled_requests.StalledRequests(scheduler)
        # A step is scheduled
        self.in_flight = flying = in_flight.InFlight(scheduler)
        self.lora_limits = lora_limits.LoraLimits(scheduler)
        self.failed_loads = failed_loads.FailedLoads(scheduler, flying)
        self.running = schedule.Running(scheduler, self.lora_limits)
        self.preemption = preemption.Preemption(scheduler, flying)
        self.refused_grammars = refused_grammars.RefusedGrammars(scheduler)
        self.kv_transfers = kv_transfers.KVTransfers(scheduler, flying)
        # Its output arrives
        self.update_outputs = update_outputs.UpdateOutputs(scheduler)
        self.sessions = sessions.Sessions(scheduler)
