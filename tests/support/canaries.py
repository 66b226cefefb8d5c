"""Canaries: values that only one request has, looked for in what a step reads for others.

A :class:`CanaryRun` is a lockstep run with one runner, whose requests (*tenants* of a row)
differ in every value that the batch holds for a row. Each step runs upstream's preparation of
inputs, and then compares what the model and the sampler are given for each row with the tenant
itself: its request and what the scheduler said of it.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.utils import CpuGpuBuffer

from support import modules
from support.lockstep import VOCABULARY, LockstepRun, RunnerUnderTest, SetAside
from support.sampling import BUILTIN

#: Tokens that one tenant has to itself, and the tenants whose tokens differ.
TOKENS = 3
TENANTS = VOCABULARY // TOKENS
#: First value of the embeddings of a prompt; those of tokens are the tokens.
EMBEDDINGS = 1000.0


class Leak(AssertionError):
    """What a step reads for a tenant is not the tenant's.

    Args:
        what: what is read.
        tenant: the number of the tenant.
        value: what it should be.
        read: what it is.
    """

    def __init__(self, what: str, tenant: int, value: object, read: object) -> None:
        super().__init__(f"{what} of tenant {tenant}: {read}, not {value}")
        self.what = what


@dataclass
class Tenant:
    """A request, all values of which are its own."""

    number: int
    params: SamplingParams
    prompt: list[int]
    #: For each position of the prompt whether it is a token; elsewhere it is an embedding.
    are_tokens: list[bool]
    lora: int
    tokens: set[int] = field(init=False)

    def __post_init__(self) -> None:
        first = self.number % TENANTS * TOKENS
        self.tokens = set(range(first, first + TOKENS))

    def embeddings(self) -> torch.Tensor:
        """Return the embeddings of the prompt, [length, 1], zero where it is a token."""
        own = EMBEDDINGS * (1 + self.number) + torch.arange(len(self.prompt)).float()
        return torch.where(torch.tensor(self.are_tokens), 0.0, own).unsqueeze(1)

    def given(self, position: int) -> set[float]:
        """Return what the model may be given at a position."""
        if position >= len(self.prompt):
            return {-1.0, *map(float, self.tokens)}
        if self.are_tokens[position]:
            return {float(self.prompt[position])}
        return {self.embeddings()[position].item()}


def draw_tenant(random: Random, number: int, drafts: bool, seeded: bool) -> Tenant:
    """Draw a tenant.

    Args:
        random: draws.
        number: of the tenant.
        drafts: the run has drafts, so that requests are greedy.
        seeded: the tenant may have a seed of its own.
    """
    own = [number % TENANTS * TOKENS + each for each in range(TOKENS)]
    values: dict[str, Any] = {
        "presence_penalty": 0.1 + number / 100,
        "frequency_penalty": 0.2 + number / 100,
        "repetition_penalty": 1.1 + number / 100,
        "min_tokens": 2 + number % 3,
        "allowed_token_ids": own,
        "bad_words": [[own[1], own[2]]],
        "logprobs": 1 + number % 5,
    }
    if not drafts:  # stock refuses some of these with drafts, and others end its engine
        values |= {"logit_bias": {own[0]: 0.5 + number / 100}, "logprob_token_ids": own[:2]}
        values |= {"temperature": 0.5 + number / 100, "top_p": 0.9 - number / 100}
        values |= {"top_k": 4 + number % 20, "min_p": 0.01 + number / 1000}
        if seeded:
            values["seed"] = 1000 + number
    params = {name: value for name, value in values.items() if random.random() < 0.5}
    if "temperature" not in params:
        params["temperature"] = 0.0
    if "logprob_token_ids" in params:
        params.pop("logprobs", None)
    words = params.pop("bad_words", None)
    sampling = SamplingParams(
        max_tokens=random.randint(4, 12), stop_token_ids=own[:1], ignore_eos=True, **params
    )
    sampling._bad_words_token_ids = words
    sampling._all_stop_token_ids |= set(own[:1])
    length = random.randint(1, 10)
    kind = random.choice(["tokens", "tokens", "embeddings", "mixed"])
    are_tokens = {
        "tokens": [True] * length,
        "embeddings": [False] * length,
        "mixed": [random.random() < 0.5 for _ in range(length)],
    }[kind]
    prompt = [random.choice(own) for _ in range(length)]
    return Tenant(number, sampling, prompt, are_tokens, random.choice([0, 0, 1 + number]))


class CanaryRunner(RunnerUnderTest):
    """A runner that prepares the inputs of each step, and checks them."""

    lockstep: "CanaryRun"

    def _logitsprocs(self) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=self.lockstep.max_num_seqs),
            speculative_config=None,
        )
        kinds = BUILTIN[:2] if self.lockstep.drafts else BUILTIN
        return LogitsProcessors([kind(config, torch.device("cpu"), False) for kind in kinds])

    def _runner(self, module: Any) -> Any:
        runner = super()._runner(module)
        rows, tokens = self.lockstep.max_num_seqs, self.lockstep.max_tokens_a_step

        def buffer(*size: int, dtype: torch.dtype = torch.int32) -> CpuGpuBuffer:
            return CpuGpuBuffer(*size, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

        vars(runner).update(
            _arange_scratch=np.zeros(tokens, np.int64),
            enable_prompt_embeds=True,
            supports_mm_inputs=False,
            model_config=SimpleNamespace(is_encoder_decoder=False, is_hybrid=False),
            model=SimpleNamespace(embed_input_ids=lambda input_ids: input_ids[:, None].float()),
            is_token_ids=buffer(tokens, dtype=torch.bool),
            inputs_embeds=buffer(tokens, 1, dtype=torch.float32),
            num_decode_draft_tokens=buffer(rows),
        )
        reorder = runner._may_reorder_batch

        def may_reorder(scheduled: Any) -> None:
            reorder(scheduled)
            for one, other in self.lockstep.swaps(self.batch.num_reqs):
                self.batch.swap_states(one, other)

        runner._may_reorder_batch = may_reorder
        # Its kernel needs a device; the block table that it reads is checked.
        self.batch.block_table.compute_slot_mapping = lambda *_: None
        return runner

    def draw_logits(self, seed: int, positions: int, drafts: Any) -> torch.Tensor:
        """Draw logits that give each tenant its own tokens."""
        logits = super().draw_logits(seed, positions, drafts)
        counts = drafts.num_draft_tokens if drafts else [0] * self.batch.num_reqs
        row = 0
        for tenant, count in zip(self.tenants(), counts, strict=True):
            logits[row : row + count + 1, min(tenant.tokens) : max(tenant.tokens) + 1] += 1000.0
            row += count + 1
        return logits

    def step(self, scheduled: Any, seed: int) -> Any:
        """Run a step, and check what it has sampled and read to do so."""
        output, copy = super().step(scheduled, seed)
        runner = self.runner
        if self.lockstep.asynchronous and self.lockstep.drafts:
            runner.valid_sampled_token_count_gpu = runner.valid_sampled_token_count_cpu
        for row, tenant in enumerate(self.tenants()):
            sampled = set(copy.source[row].tolist())
            if not runner.discard_request_mask.np[row]:
                self._within("sampled", tenant, sampled)
            self._within("output", tenant, self.batch.req_output_token_ids[row])
            self._within("drafts", tenant, self.batch.spec_token_ids[row])
        return output, copy

    def tenants(self) -> Iterator[Tenant]:
        """Yield the tenant of each row."""
        return (self.lockstep.tenants[req_id] for req_id in self.batch.req_ids)

    def inspect(self, scheduled: Any) -> None:
        """Check what the model and the sampler are given for each row."""
        counts = np.array([scheduled.num_scheduled_tokens[r] for r in self.batch.req_ids])
        self._inspect_rows(scheduled)
        self._inspect_sampling()
        self._inspect_processors()
        self._inspect_inputs(scheduled, counts)

    def _same(self, what: str, tenant: Tenant, value: Any, read: Any) -> None:
        same = abs(value - read) < 1e-6 if isinstance(value, float) else value == read
        if not same:
            raise Leak(what, tenant.number, value, read)

    def _within(self, what: str, tenant: Tenant, read: Any) -> None:
        if not tenant.tokens | {-1} >= set(read):
            raise Leak(what, tenant.number, tenant.tokens, read)

    def _inspect_rows(self, scheduled: Any) -> None:
        """Check what the runner reads of a row to prepare it."""
        batch = self.batch
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        table = batch.block_table[0]
        for row, tenant in enumerate(self.tenants()):
            req_id = batch.req_ids[row]
            same = [
                ("prompt length", len(tenant.prompt), batch.num_prompt_tokens[row].item()),
                ("computed", computed[req_id], batch.num_computed_tokens_cpu[row].item()),
                ("lora", tenant.lora, batch.request_lora_mapping[row].item()),
            ]
            blocks = self.lockstep.blocks(req_id)
            blocks += [0] * (table.block_table.np.shape[1] - len(blocks))
            same.append(("blocks", blocks, table.block_table.np[row].tolist()))
            embeds = batch.req_prompt_embeds.get(row)
            first = None if embeds is None else embeds.flatten().tolist()
            own = None if all(tenant.are_tokens) else tenant.embeddings().flatten().tolist()
            same.append(("embeddings", own, first))
            for what, value, read in same:
                self._same(what, tenant, value, read)
        nobody = table.block_table.np[batch.num_reqs :]
        if nobody.any():
            raise Leak("blocks", -1, 0, nobody.tolist())
        loras = {tenant.lora for tenant in self.tenants()} - {0}
        read = {each.lora_int_id for each in batch.lora_id_to_lora_request.values()}
        if loras != read:
            raise Leak("loras", -1, loras, read)

    def _inspect_sampling(self) -> None:
        """Check the sampler's metadata."""
        metadata = self.batch.sampling_metadata
        lists = dict(metadata.logprob_token_ids or {})
        most = 0
        for row, tenant in enumerate(self.tenants()):
            params = tenant.params
            greedy = params.temperature == 0.0
            expected = [
                ("temperature", params.temperature, metadata.temperature),
                ("top_p", params.top_p, metadata.top_p),
                ("top_k", params.top_k if params.top_k > 0 else VOCABULARY, metadata.top_k),
            ]
            if not metadata.no_penalties:
                expected += [
                    ("presence", params.presence_penalty, metadata.presence_penalties),
                    ("frequency", params.frequency_penalty, metadata.frequency_penalties),
                    ("repetition", params.repetition_penalty, metadata.repetition_penalties),
                ]
            for what, value, tensor in expected:
                if tensor is not None:
                    self._same(what, tenant, value, tensor[row].item())
                elif what == "temperature":
                    self._same(what, tenant, greedy, True)
            generator = metadata.generators.get(row)
            seed = None if generator is None else generator.initial_seed()
            self._same("seed", tenant, None if greedy else params.seed, seed)
            words = metadata.bad_words_token_ids.get(row)
            self._same("bad words", tenant, params.bad_words_token_ids or None, words)
            self._same("logprobs of", tenant, params.logprob_token_ids, lists.pop(row, None))
            if metadata.allowed_token_ids_mask is not None:
                mask = metadata.allowed_token_ids_mask[row]
                allowed = set((~mask).nonzero().flatten().tolist())
                own = set(params.allowed_token_ids or range(VOCABULARY))
                self._same("allowed", tenant, own, allowed)
            if not metadata.no_penalties:
                ids = metadata.prompt_token_ids
                if ids is None:  # the overlay makes them if penalties fall back
                    ids = self.batch._make_prompt_token_ids_cpu_tensor()
                prompt = ids[row].tolist()
                embedded = not any(tenant.are_tokens)
                own_prompt = [0] * len(tenant.prompt) if embedded else tenant.prompt
                own_prompt = own_prompt + [VOCABULARY] * (len(prompt) - len(own_prompt))
                self._same("prompt", tenant, own_prompt, prompt)
            if metadata.output_token_ids:
                self._within("output", tenant, metadata.output_token_ids[row])
            self._within("drafts", tenant, metadata.spec_token_ids[row])
            most = max(most, params.logprobs or 0)
        rows = {*metadata.generators, *metadata.bad_words_token_ids, *lists}
        if any(row >= self.batch.num_reqs for row in rows) or lists:
            raise Leak("rows", -1, self.batch.num_reqs, rows)
        if (metadata.max_num_logprobs or 0) != most:
            raise Leak("logprobs", -1, most, metadata.max_num_logprobs)

    def _inspect_processors(self) -> None:
        """Check the logits processors' tensors."""
        processors = {type(each).__name__: each for each in self.batch.logitsprocs.all}
        biases: dict[int, dict[int, float]] = {}
        processor = processors["LogitBiasLogitsProcessor"]
        cells = zip(*processor.logits_slice, processor.bias_tensor, strict=True)
        for row, token, bias in cells if processor.biases else ():
            biases.setdefault(row.item(), {})[token.item()] = round(bias.item(), 4)
        stops: dict[int, set[int]] = {}
        kind = MinTokensLogitsProcessor  # or ours, which is derived from it
        processor = next(each for each in processors.values() if isinstance(each, kind))
        for row, token in zip(*processor.logits_slice, strict=True) if processor.min_toks else ():
            stops.setdefault(row.item(), set()).add(token.item())
        min_p = processors.get("MinPLogitsProcessor")
        for row, tenant in enumerate(self.tenants()):
            params = tenant.params
            bias = {token: round(value, 4) for token, value in (params.logit_bias or {}).items()}
            self._same("bias", tenant, bias, biases.pop(row, {}))
            output = self.batch.req_output_token_ids[row]
            short = len(output) < params.min_tokens
            own, read = params.all_stop_token_ids if short else set(), stops.pop(row, set())
            if read or not self.lockstep.drafts:  # stock forgets lengths that drafts inflate
                self._same("stops", tenant, own, read)
            if min_p is not None and min_p.min_p_count:
                self._same("min_p", tenant, params.min_p, min_p.min_p[row].item())
        if biases or stops:
            raise Leak("rows", -1, {}, (biases, stops))

    def _inspect_inputs(self, scheduled: Any, counts: np.ndarray) -> None:
        """Prepare the step's inputs, and check the embeddings that the model is given."""
        runner, batch = self.runner, self.batch
        drafts = runner._draft_token_ids
        if isinstance(drafts, list):  # on a device they are a tensor
            runner._draft_token_ids = torch.tensor(drafts, dtype=torch.int32)
        with torch.compiler.set_stance("force_eager"):
            runner._prepare_inputs(scheduled, counts)
        runner._draft_token_ids = drafts
        total = scheduled.total_num_scheduled_tokens
        _, embeddings, *_ = runner._preprocess(scheduled, total)
        rows = np.repeat(np.arange(batch.num_reqs), counts)
        starts = batch.num_computed_tokens_cpu[rows]
        positions = starts + runner.query_pos.np[:total]
        given = zip(
            embeddings.flatten().tolist(), runner.input_ids.gpu[:total].tolist(), strict=True
        )
        tenants = list(self.tenants())
        what = "drafted inputs" if self.lockstep.drafts else "inputs"
        for row, position, (value, token) in zip(rows, positions, given, strict=True):
            own = tenants[row].given(position)
            if position >= len(tenants[row].prompt):
                own &= {float(token)}
            if value not in own:
                raise Leak(what, tenants[row].number, own, value)


class CanaryRun(LockstepRun):
    """A lockstep run of one runner, with tenants.

    Args:
        random: draws everything.
        asynchronous: as for :class:`LockstepRun`.
        drafts: as for :class:`LockstepRun`.
        load: modules.pristine or modules.overlaid.
        switch: the value of VLLM_READINESS.
    """

    def __init__(
        self,
        random: Random,
        asynchronous: bool,
        drafts: int,
        load: Callable[[str], Any] = modules.overlaid,
        switch: str = "",
    ) -> None:
        self.draws = random
        self.tenants: dict[str, Tenant] = {}
        #: Upstream's runner cannot take back a draw of a CPU generator, as for a part of a prompt.
        self.seeded = random.random() < 0.5
        self.kept: dict[str, list[int]] = {}
        self.load = load
        super().__init__(
            random.randrange(1000),
            asynchronous,
            drafts,
            max_num_seqs=random.randint(2, 5),
            max_tokens_a_step=400 if self.seeded else random.choice([6, 12, 24]),
            num_blocks=random.choice([18, 40]),
            max_model_len=40,
            reorder_threshold=random.choice([None, 1 + drafts]),
            switch=switch,
            arrives=lambda: random.random() < 0.5,
        )

    def make_runners(self, arrives: Any, twins: bool) -> list[RunnerUnderTest]:
        """Make the one runner."""
        self.stock = self.ours = CanaryRunner(self.load, self, arrives)
        self.twins = []
        return [self.ours]

    def admit(self, req_id: str | None = None, tenant: Tenant | None = None) -> None:
        """Admit a tenant.

        Args:
            req_id: the id of a former one; None for a new one.
            tenant: the tenant; None to draw one.
        """
        number, self.added = self.added, self.added + 1
        req_id = req_id or f"r{number}"
        tenant = tenant or draw_tenant(self.draws, number, self.drafts > 0, self.seeded)
        tokens, embeddings = any(tenant.are_tokens), not all(tenant.are_tokens)
        self.tenants[req_id] = tenant
        lora = f"lora{tenant.lora}"
        self.scheduler.add_request(
            Request(
                request_id=req_id,
                prompt_token_ids=tenant.prompt if tokens else None,
                prompt_embeds=tenant.embeddings() if embeddings else None,
                prompt_is_token_ids=tenant.are_tokens if tokens and embeddings else None,
                sampling_params=tenant.params,
                pooling_params=None,
                arrival_time=number,
                lora_request=LoRARequest(lora, tenant.lora, "/lora") if tenant.lora else None,
            )
        )

    def readmit(self, req_id: str) -> None:
        """Abort a tenant, and admit another under its id."""
        self.read()  # upstream's scheduler gives the old one's tokens in flight to the new one
        self.abort(req_id)
        self.admit(req_id)

    def run_drawn(self, steps: int) -> None:
        """Run steps in which tenants come, go, and are moved.

        Raises:
            Leak: a step reads for a tenant what is not the tenant's.
        """
        draws = self.draws
        try:
            for _ in range(steps):
                for _ in range(draws.choice([0, 0, 1, 3])):
                    self.admit()
                if self.tenants and draws.random() < 0.4:
                    req_id = draws.choice(sorted(self.tenants))
                    event = draws.choice(["abort", "readmit", "preempt", "drop"])
                    if event == "preempt" and not (self.asynchronous and self.drafts):
                        self.preempt_all()
                    elif event == "drop":
                        self.drop_drafts()
                    elif event == "readmit":
                        self.readmit(req_id)
                    elif event == "abort":
                        self.abort(req_id)
                self.step(read_first=draws.random() < 0.3)
        except SetAside:
            pass  # upstream's scheduler cannot go on

    def swaps(self, rows: int) -> Iterator[tuple[int, int]]:
        """Draw pairs of rows that an attention backend exchanges."""
        while rows > 1 and self.draws.random() < 0.3:
            one, other = self.draws.sample(range(rows), 2)
            yield one, other

    def blocks(self, req_id: str) -> list[int]:
        """Return the blocks of a request."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(req_id)[0])

    def draw_drafts(self, seed: int, req_id: str) -> list[int]:
        """Draw drafts from the tenant's own tokens."""
        first = min(self.tenants[req_id].tokens)
        return [first + token for token in super().draw_drafts(seed, req_id)]

    def _run(self, scheduled: Any) -> None:
        if not scheduled.total_num_scheduled_tokens:
            self.ours.runner._update_states(copy.deepcopy(scheduled))
            return
        seed = self.random.randrange(2**31)
        output, in_flight = self.ours.step(pickle.loads(pickle.dumps(scheduled)), seed)
        if self.drafts:
            self.proposed = {r: self.draw_drafts(seed, r) for r in self.ours.batch.req_ids}
        self.in_flight.append((scheduled, output, [in_flight]))
