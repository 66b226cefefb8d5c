"""A scheduler with several steps in flight, over a worker whose every token names its place.

The scheduler is a real one. The worker stands for a model runner: it keeps a request's tokens
as ``GPUModelRunner._update_states`` does, and samples the right token only from the right
history.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

#: What the worker samples where its history is wrong.
WRONG = -9
#: Stands for a prompt's logprobs.
PROMPT_LOGPROBS = "prompt logprobs"


def token(name: str, place: int) -> int:
    """The output token of a request at a place, as 3007 for place 7 of request "3"."""
    return 1000 * int(name) + place


class Steps:
    """An engine's loop.

    Args:
        scheduler: the scheduler.
        in_flight: most steps in flight, that is the stages of a pipeline, or 2.
        accepts: number of drafts that the model accepts, given the most that it could.

    Attributes:
        delivered: the tokens that each request was given.
        finished: the finish reasons of each request, one for each turn of a session.
        released: ids of finished requests that clients may forget.
        prompts: the logprobs of prompts that requests were given.
        orphans: requests that ran with drafts that the worker did not propose.
        scheduled: each step's requests, and how many tokens each had scheduled.
        hasher: of the requests' blocks; None without a prefix cache.
    """

    hasher: Any = None

    def __init__(
        self, scheduler: Any, in_flight: int = 2, accepts: Callable[[int], int] = lambda most: 0
    ) -> None:
        self.scheduler = scheduler
        self.most = in_flight
        self.accepts = accepts
        self.queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.delivered: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: defaultdict[str, list[FinishReason]] = defaultdict(list)
        self.released: set[str] = set()
        self.prompts: dict[str, Any] = {}
        self.orphans: list[str] = []
        self.scheduled: list[dict[str, int]] = []
        self.added: dict[str, int] = {}
        self._prompts: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        #: Requests of the last step that ran, and whether they had drafts in it.
        self._last: dict[str, bool] = {}
        self._shown: set[str] = set()

    def add(self, prompt: int | list[int], max_tokens: int, **params: Any) -> str:
        """Add a request with a prompt, given as token ids or as a length."""
        name = str(len(self.added) + 1)
        self.added[name] = max_tokens
        self.delivered[name] = []
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        ids = prompt if isinstance(prompt, list) else [-1 - place for place in range(prompt)]
        arrival = len(self.added)
        self.scheduler.add_request(
            Request(name, ids, sampling, None, arrival_time=arrival, block_hasher=self.hasher)
        )
        return name

    def abort(self, name: str) -> None:
        """Abort a request, if it has not ended."""
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.added[name] = len(self.delivered[name])

    def step(self) -> None:
        """Schedule a step, run it, and read the output that is due, as an engine does."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.scheduled.append(scheduled.num_scheduled_tokens)
            self.queue.append((scheduled, self._run(scheduled)))
            if scheduled.total_num_scheduled_tokens and len(self.queue) < self.most:
                return
        if self.queue:
            received = self.scheduler.update_from_output(*self.queue.popleft()).get(0)
            if received is None:
                return
            self.released |= received.finished_requests or set()
            for output in received.outputs:
                self.delivered[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.finished[output.request_id].append(output.finish_reason)
                if output.new_prompt_logprobs_tensors:
                    self.prompts[output.request_id] = output.new_prompt_logprobs_tensors

    def finish(self, most: int = 500) -> None:
        """Run until no request is left.

        Raises:
            TimeoutError: that is never so.
        """
        for _ in range(most):
            if not self.scheduler.requests and not self.queue:
                return
            self.step()
        raise TimeoutError

    def faults(self) -> list[str]:
        """Requests that were not given each of their tokens, once and in order."""
        return [
            name
            for name, count in self.added.items()
            if self.delivered[name] != [token(name, place) for place in range(count)]
        ]

    def _run(self, scheduled: Any) -> ModelRunnerOutput:
        computed: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids)
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[at]
            count = cached.num_output_tokens[at]
            if name in self._last and name not in cached.resumed_req_ids:
                if self._last[name]:  # the device knows how many were accepted
                    computed[name] = len(self._tokens[name]) - 1
            else:
                output = cached.all_token_ids[name][-count:] if count else []
                self._tokens[name] = self._prompts[name] + output
        last, self._last = self._last, {}
        names = list(scheduled.num_scheduled_tokens)
        sampled, prompts = [], {}
        for name in names:
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            if drafts and (name not in last or name in cached.resumed_req_ids):
                self.orphans.append(name)
            tokens = self._sample(name, computed[name], scheduled, drafts)
            self._last[name] = drafts > 0
            self._tokens[name] += tokens
            sampled.append(tokens)
            asks = self.scheduler.requests[name].sampling_params.prompt_logprobs is not None
            if tokens and asks and name not in self._shown:
                self._shown.add(name)
                prompts[name] = PROMPT_LOGPROBS
        rows = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, rows, sampled, prompt_logprobs_dict=prompts)

    def _sample(self, name: str, computed: int, scheduled: Any, drafts: int) -> list[int]:
        known, prompt = self._tokens[name], self._prompts[name]
        end = computed + scheduled.num_scheduled_tokens[name] - drafts
        if end < len(known):
            return []
        place = len(known) - len(prompt)
        right = prompt + [token(name, earlier) for earlier in range(place)]
        if end > len(known) or known != right:
            return [WRONG]
        return [token(name, place + later) for later in range(1 + self.accepts(drafts))]
