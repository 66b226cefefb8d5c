"""V1's samplers, upstream's and overlaid, given the same requests and logits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.utils import cpu_triton_utils as cpu_kernels
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from support import modules
from support.batches import Spec, empty, state
from support.processors import ForbidLatest

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
BUILTIN = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
KERNELS = (
    "rejection_greedy_sample_kernel",
    "rejection_random_sample_kernel",
    "sample_recovered_tokens_kernel",
)


class Expand:
    """Upstream's expand_kernel; its CPU version does not write float32 and int32."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """Return the launch function."""

        def launch(
            output: torch.Tensor,
            source: torch.Tensor,
            ends: torch.Tensor,
            replace_from: float,
            replace_to: float,
            **_: int,
        ) -> None:
            counts = ends.diff(prepend=ends.new_zeros(1))
            values = torch.where(source == replace_from, replace_to, source)
            output.copy_(values.repeat_interleave(counts))

        return launch


@dataclass
class Case:
    """A batch and its logits.

    Attributes:
        requests: sampling parameters of each request.
        logits: [positions, vocab].
        mode: the logprobs mode.
        drafts: draft tokens of each request; None without speculative decoding.
        processor: whether the batch has a user's logits processor.
    """

    requests: Sequence[dict[str, Any]]
    logits: torch.Tensor
    mode: str = "raw_logprobs"
    drafts: list[list[int]] | None = None
    processor: bool = False


@dataclass
class SamplerUnderTest:
    """A sampler with a case's batch, pristine or overlaid.

    Attributes:
        batch: the input batch.
        logits: a copy of the case's; sampling may change them.
        sample: samples once.
        result: the sampler's output; None if it raised.
        error: the type of the error that it raised.
        states: the states of all generators after sampling.
    """

    batch: Any
    logits: torch.Tensor
    sample: Callable[[], Any]
    result: Any = None
    error: type[Exception] | None = None
    states: list[torch.Tensor] = field(default_factory=list)


def under_test(load: Callable[[str], Any], case: Case) -> SamplerUnderTest:
    """Make a sampler and its batch; ``load`` is modules.pristine or modules.overlaid."""
    device = case.logits.device
    sampler = load(modules.SAMPLER).Sampler(case.mode)
    rejection = load(modules.REJECTION_SAMPLER)
    if device.type == "cpu":
        for name in KERNELS:
            setattr(rejection, name, getattr(cpu_kernels, name))
        rejection.expand_kernel = Expand()
    batch = _batch(load, case)
    logits = case.logits.clone(memory_format=torch.preserve_format)
    drafts = None
    if case.drafts is not None:
        drafts = _drafts(case.drafts, device)
        for row, ids in enumerate(case.drafts):
            batch.spec_token_ids[row].extend(ids)
    rejecting = rejection.RejectionSampler(sampler)

    def prepare() -> None:
        if hasattr(batch, "readiness"):
            batch.readiness.history.begin_step()
            batch.readiness.begin_sampling(logits, drafts)

    prepare()  # The first step recognises the samplers; copies are planned from the second on.

    def sample() -> Any:
        prepare()
        if drafts is None:
            return sampler(logits, batch.sampling_metadata)
        return rejecting(drafts, None, logits, batch.sampling_metadata)

    return SamplerUnderTest(batch, logits, sample)


def _drafts(tokens: list[list[int]], device: torch.device) -> SpecDecodeMetadata:
    """Make the metadata of drafts: a request has a row for each, and one for the bonus token."""
    drafts = SpecDecodeMetadata.make_dummy(tokens, device)
    ends = [row for row, ids in enumerate(tokens) for _ in [*ids, None]]
    last = [n + 1 == len(ends) or ends[n + 1] != row for n, row in enumerate(ends)]
    rows = torch.arange(len(ends), dtype=torch.int32)
    drafts.bonus_logits_indices = rows[torch.tensor(last)].to(device)
    drafts.target_logits_indices = rows[~torch.tensor(last)].to(device)
    return drafts


def _batch(load: Callable[[str], Any], case: Case) -> Any:
    device, vocab = case.logits.device, case.logits.shape[1]
    batch = empty(load, vocab, device.type, num_spec_tokens=3 if case.drafts else 0)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=16), speculative_config=None
    )
    kinds: list[Any] = [*BUILTIN, ForbidLatest] if case.processor else [*BUILTIN]
    if case.drafts is not None:
        kinds.remove(MinPLogitsProcessor)  # as upstream does
    pinned = device.type == "cuda"
    batch.logitsprocs = LogitsProcessors([kind(config, device, pinned) for kind in kinds])
    batch.logitsprocs_need_output_token_ids = case.processor
    for number, request in enumerate(case.requests):
        params = dict(request)
        seed, words = params.pop("seed", None), params.pop("bad_words_token_ids", None)
        spec = Spec([1, 2, 3], [4, 5], {**params, "bad_words": words})
        cached = state(spec, f"r{number}")
        if seed is not None:
            cached.generator = torch.Generator(device).manual_seed(seed)
        batch.add_request(cached)
    batch.refresh_metadata()
    return batch


def run(one: SamplerUnderTest, seed: int = 1) -> SamplerUnderTest:
    """Sample, with the global generators seeded."""
    torch.manual_seed(seed)
    try:
        with torch.compiler.set_stance("force_eager"):  # else it compiles every shape
            one.result = one.sample()
    except Exception as error:
        one.error = type(error)
    one.states = [torch.get_rng_state()]
    if one.logits.is_cuda:
        one.states.append(torch.cuda.get_rng_state())
    one.states += [g.get_state() for _, g in sorted(one.batch.generators.items())]
    return one


def compare(case: Case) -> SamplerUnderTest:
    """Sample on both sides and require the same bits.

    Returns:
        The overlaid side.
    """
    stock, ours = run(under_test(modules.pristine, case)), run(under_test(modules.overlaid, case))
    assert ours.error is stock.error
    for one, other in zip(ours.states, stock.states, strict=True):
        assert torch.equal(one, other)
    if stock.error is None:
        same(ours.result.sampled_token_ids, stock.result.sampled_token_ids)
        mine, theirs = ours.result.logprobs_tensors, stock.result.logprobs_tensors
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            for one, other in zip(mine, theirs, strict=True):
                if isinstance(other, torch.Tensor):
                    same(one, other)
                else:
                    assert one == other
    return ours


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Require the same shape, dtype, layout and bits; all NaNs are equal."""
    assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    if one.is_floating_point():
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (x.nan_to_num(0.0, torch.inf, -torch.inf) for x in (one, other))
        assert torch.equal(one.signbit(), other.signbit())
    assert torch.equal(one, other)


class Passes(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations that write tensors of [rows, vocab], new or in place."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it by its result."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        known = {id(x) for x in args if isinstance(x, torch.Tensor)}
        for output in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(output, torch.Tensor) or output.shape[-1:] != (self.vocab,):
                continue
            # Writing a few logits by index is no pass over them.
            in_place = id(output) in known and name != "index_put_"
            if output.numel() > self.vocab and (
                in_place or (id(output) not in known and output._base is None)
            ):
                self.counts[name] += not func.is_view
        return result


def passes(one: SamplerUnderTest) -> Counter[str]:
    """Sample, and count by name the operations that write all logits or a copy of them."""
    mode = Passes(one.logits.shape[1])
    with mode:
        one.sample()
    return mode.counts
