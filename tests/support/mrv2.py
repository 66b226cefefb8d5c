"""Model Runner V2's samplers, upstream's and overlaid, given the same requests and logits.

Without a GPU, upstream's modules are imported anew under Triton's interpreter, with
replacements for what needs a device: buffers shared by host and device (UvaBuffer) are plain
tensors, uploads start from unpinned memory, and NaNs are not counted, which needs libdevice.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import torch_utils

from support import modules

GPU = "vllm.v1.worker.gpu"
#: Imported anew: upstream's modules with kernels, and ours that import them.
_ANEW = (
    f"{GPU}.buffer_utils",
    f"{GPU}.input_batch",
    f"{GPU}.states",
    f"{GPU}.metrics",
    f"{GPU}.sample",
    f"{GPU}.spec_decode",
    "vllm.v1.readiness.sample.sampler_copies_mrv2",
    "vllm.v1.sample.ops.topk_topp_triton",
)


@dataclass
class Sides:
    """The modules of both sides.

    Attributes:
        stock: upstream's sampler module.
        ours: the overlaid sampler module.
        copies: our module, as the overlaid sampler imported it.
        rejection: upstream's rejection sampler module, used by both.
    """

    stock: Any
    ours: Any
    copies: Any
    rejection: Any


@cache
def real() -> Sides:
    """Modules whose kernels run on a GPU."""
    return Sides(
        modules.pristine(modules.MRV2_SAMPLER),
        modules.overlaid(modules.MRV2_SAMPLER),
        importlib.import_module("vllm.v1.readiness.sample.sampler_copies_mrv2"),
        importlib.import_module(f"{GPU}.spec_decode.rejection_sampler"),
    )


@contextmanager
def interpreted() -> Iterator[Sides]:
    """Modules whose kernels run in Triton's interpreter; other tests do not see them."""
    with pytest.MonkeyPatch.context() as patch, modules.triton_interpreted(*_ANEW):
        upload = partial(torch_utils.async_tensor_h2d, pin_memory=False)
        patch.setattr(torch_utils, "async_tensor_h2d", upload)
        sys.modules[f"{GPU}.metrics.logits"] = ModuleType("stand-in")
        sys.modules[f"{GPU}.metrics.logits"].get_num_nans = None  # type: ignore[attr-defined]
        buffers = importlib.import_module(f"{GPU}.buffer_utils")
        buffers.UvaBuffer = _Shared  # type: ignore[attr-defined]
        stock = importlib.import_module(f"{GPU}.sample.sampler")
        ours = modules.overlaid.__wrapped__(modules.MRV2_SAMPLER)
        copies = ours.readiness.sampler_copies_mrv2
        rejection = importlib.import_module(f"{GPU}.spec_decode.rejection_sampler")
        yield Sides(stock, ours, copies, rejection)


class _Shared:
    """A buffer shared by host and device."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


@dataclass
class Case:
    """A batch and its logits.

    Attributes:
        requests: sampling parameters of each request.
        logits: [positions, vocab].
        mode: the logprobs mode.
        drafts: draft tokens of each request; None without speculative decoding.
        draft_logits: [places, drafts, vocab]; None if drafts have probability 1.
        fp64: whether Gumbel noise is float64.
    """

    requests: Sequence[dict[str, Any]]
    logits: torch.Tensor
    mode: str = "raw_logprobs"
    drafts: list[list[int]] | None = None
    draft_logits: torch.Tensor | None = None
    fp64: bool = False


@dataclass
class SamplerUnderTest:
    """A sampler with a case's requests, pristine or overlaid.

    Attributes:
        sampler: the sampler.
        logits: a copy of the case's; sampling may change them.
        sample: samples; it may be called again.
        batch: the input batch.
    """

    sampler: Any
    logits: torch.Tensor
    sample: Callable[[], Any]
    batch: Any = field(repr=False)


PROMPT = [3, 1, 4, 1, 5]
DRAFTS = 2


def under_test(sides: Sides, module: Any, case: Case, room: int | None = None) -> SamplerUnderTest:
    """Make a sampler and its batch; ``module`` is ``sides.stock`` or ``sides.ours``."""
    device, vocab = case.logits.device, case.logits.shape[1]
    count = len(case.requests)
    room = room or count + 2
    places = [room - 1 - n for n in range(count)]
    states = _request_states(room, vocab, device)
    sampler = module.Sampler(
        max_num_reqs=room,
        vocab_size=vocab,
        device=device,
        req_states=states,
        logprobs_mode=case.mode,
        num_speculative_tokens=DRAFTS + 1 if case.drafts else 1,
        use_fp64_gumbel=case.fp64,
    )
    for number, (request, place) in enumerate(zip(case.requests, places, strict=True)):
        add(sampler, place, {"seed": 1000 + number, **request})
    sampler.apply_staged_writes()
    batch = _batch(case, places)
    logits = case.logits.clone(memory_format=torch.preserve_format)
    if not case.logits.is_contiguous():  # keep a slice of a wider tensor
        wide = case.logits.new_zeros(len(logits), case.logits.stride(0))
        logits = wide[:, :vocab].copy_(case.logits)
    if case.drafts is None:
        return SamplerUnderTest(sampler, logits, lambda: sampler(logits, batch), batch)
    config = SimpleNamespace(num_speculative_tokens=DRAFTS, rejection_sample_method="strict")
    rejecting = sides.rejection.RejectionSampler(sampler, config, device)
    return SamplerUnderTest(
        sampler, logits, lambda: rejecting(logits, batch, case.draft_logits), batch
    )


def add(sampler: Any, place: int, request: dict[str, Any]) -> None:
    """Add a request, perhaps in the place of another."""
    fields = dict(request)
    words = fields.pop("bad_words_token_ids", None)
    params = SamplingParams(**fields)
    params._bad_words_token_ids = words
    sampler.add_request(place, len(PROMPT), params)


def _request_states(room: int, vocab: int, device: torch.device) -> Any:
    """Make the part of RequestState that samplers read; all requests have the same history."""
    history = torch.tensor([*PROMPT, 9, 2], dtype=torch.int32, device=device).repeat(room, 1)

    def lengths(length: int) -> Any:
        numbers = np.full(room, length, dtype=np.int32)
        return SimpleNamespace(np=numbers, gpu=torch.from_numpy(numbers).to(device))

    return SimpleNamespace(
        max_num_reqs=room,
        vocab_size=vocab,
        device=device,
        all_token_ids=SimpleNamespace(gpu=history),
        prompt_len=lengths(len(PROMPT)),
        prefill_len=lengths(history.shape[1]),
        total_len=lengths(history.shape[1]),
    )


def _batch(case: Case, places: list[int]) -> Any:
    """Make the part of InputBatch that samplers read."""
    device = case.logits.device
    drafts = case.drafts or [[] for _ in places]
    rows = [row for row, ids in enumerate(drafts) for _ in [*ids, None]]
    local = [place for ids in drafts for place in range(len(ids) + 1)]
    tokens = [token for ids in drafts for token in [2, *ids]]
    mapping = np.array(places, dtype=np.int32)
    ends = np.cumsum([0, *(len(ids) + 1 for ids in drafts)]).astype(np.int32)

    def put(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(device, dtype)

    return SimpleNamespace(
        num_reqs=len(places),
        idx_mapping=put(mapping),
        idx_mapping_np=mapping,
        expanded_idx_mapping=put(mapping[rows]),
        expanded_local_pos=put(local),
        cu_num_logits=put(ends),
        cu_num_logits_np=ends,
        positions=put([6 + n for n in local], torch.int64),
        input_ids=put(tokens),
        logits_indices=put(np.arange(len(rows)), torch.int64),
        seq_lens=put([7] * len(places)),
    )


def compare(sides: Sides, case: Case) -> SamplerUnderTest:
    """Sample twice on both sides and require the same bits.

    Returns:
        The overlaid side.
    """
    stock, ours = (under_test(sides, module, case) for module in (sides.stock, sides.ours))
    for _ in range(2):
        for one in (stock, ours):
            one.logits.copy_(case.logits)
        same(ours.sample(), stock.sample())
    return ours


def same(one: Any, other: Any) -> None:
    """Require the same tokens, counts, logprobs and ranks, to the bit."""
    limit = torch.arange(other.sampled_token_ids.shape[1], device=other.num_sampled.device)
    written = limit < other.num_sampled[:, None]  # the rest is not initialised
    assert torch.equal(one.num_sampled, other.num_sampled)
    tokens = (x.sampled_token_ids.where(written, -1) for x in (one, other))
    assert torch.equal(*tokens)
    assert (one.logprobs_tensors is None) == (other.logprobs_tensors is None)
    if other.logprobs_tensors is not None:
        for mine, theirs in zip(one.logprobs_tensors, other.logprobs_tensors, strict=True):
            if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
                assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
            elif isinstance(theirs, torch.Tensor):
                assert torch.equal(mine, theirs)
            else:
                assert mine == theirs
