"""Model Runner V2's samplers, upstream's and ours, given the same requests and logits.

Where there is no GPU, upstream's modules are imported anew under Triton's interpreter, with
stand-ins for what needs a device: the buffers that host and device share (UvaBuffer) are
plain tensors, uploads start from memory that is not pinned, and NaNs are not counted, which
needs libdevice.
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
#: Imported anew: upstream's modules of kernels, ours that import them, and Triton, whose own
#: functions (tl.max, tl.rand) are interpreted only if it is imported for that.
_ANEW = (
    "triton",
    f"{GPU}.buffer_utils",
    f"{GPU}.input_batch",
    f"{GPU}.states",
    f"{GPU}.metrics",
    f"{GPU}.sample",
    f"{GPU}.spec_decode",
    "vllm.v1.readiness.sampler_copies_mrv2",
    "vllm.v1.sample.ops.topk_topp_triton",
)


@dataclass
class Sides:
    """The modules of both sides.

    Attributes:
        stock: upstream's sampler module.
        ours: the same overlaid.
        copies: our module, as the overlaid sampler imported it.
        rejection: upstream's rejection sampler's module, which serves both.
    """

    stock: Any
    ours: Any
    copies: Any
    rejection: Any


@cache
def real() -> Sides:
    """With the kernels that a GPU runs."""
    return Sides(
        modules.pristine(modules.MRV2_SAMPLER),
        modules.overlaid(modules.MRV2_SAMPLER),
        importlib.import_module("vllm.v1.readiness.sampler_copies_mrv2"),
        importlib.import_module(f"{GPU}.spec_decode.rejection_sampler"),
    )


@contextmanager
def interpreted() -> Iterator[Sides]:
    """With Triton's interpreter; no other test sees these modules."""

    def anew(name: str) -> bool:
        return not name.startswith("triton._C") and any(
            name == part or name.startswith(f"{part}.") for part in _ANEW
        )

    kept = {name: module for name, module in sys.modules.items() if anew(name)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        upload = partial(torch_utils.async_tensor_h2d, pin_memory=False)
        patch.setattr(torch_utils, "async_tensor_h2d", upload)
        for name in kept:
            del sys.modules[name]
        sys.modules[f"{GPU}.metrics.logits"] = ModuleType("stand-in")
        sys.modules[f"{GPU}.metrics.logits"].get_num_nans = None  # type: ignore[attr-defined]
        try:
            triton = importlib.import_module("triton")
            language = importlib.import_module("triton.language")
            facade = SimpleNamespace(HAS_TRITON=True, tl=language, triton=triton)
            patch.setitem(sys.modules, "vllm.triton_utils", facade)
            buffers = importlib.import_module(f"{GPU}.buffer_utils")
            buffers.UvaBuffer = _Shared  # type: ignore[attr-defined]
            stock = importlib.import_module(f"{GPU}.sample.sampler")
            ours = modules.overlaid.__wrapped__(modules.MRV2_SAMPLER)
            copies = importlib.import_module("vllm.v1.readiness.sampler_copies_mrv2")
            rejection = importlib.import_module(f"{GPU}.spec_decode.rejection_sampler")
            yield Sides(stock, ours, copies, rejection)
        finally:
            for name in [name for name in sys.modules if anew(name)]:
                del sys.modules[name]
            sys.modules.update(kept)
            _reattach(kept)


def _reattach(kept: dict[str, ModuleType]) -> None:
    """Packages hold their modules as attributes, too."""
    for name, module in kept.items():
        package, _, stem = name.rpartition(".")
        if package:
            setattr(sys.modules[package], stem, module)


class _Shared:
    """A buffer that host and device share."""

    def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


@dataclass
class Case:
    """A batch and its logits.

    Attributes:
        requests: sampling parameters of each.
        logits: [positions, vocab].
        mode: of logprobs.
        drafts: tokens of each request; None: the step has none.
        draft_logits: [places, drafts, vocab]; None: drafts are certain.
        places: of the requests; None: one after the other, the last first.
        fp64: whether noise is in float64.
    """

    requests: Sequence[dict[str, Any]]
    logits: torch.Tensor
    mode: str = "raw_logprobs"
    drafts: list[list[int]] | None = None
    draft_logits: torch.Tensor | None = None
    places: list[int] | None = None
    fp64: bool = False


@dataclass
class Half:
    """One side of a case.

    Attributes:
        sampler: which knows the case's requests.
        logits: the case's, which sampling may change.
        sample: samples, once or again.
        batch: what is sampled for.
    """

    sampler: Any
    logits: torch.Tensor
    sample: Callable[[], Any]
    batch: Any = field(repr=False)


PROMPT = [3, 1, 4, 1, 5]
DRAFTS = 2


def half(sides: Sides, module: Any, case: Case, room: int | None = None) -> Half:
    """A side that has not sampled yet; ``module`` is ``sides.stock`` or ``sides.ours``."""
    device, vocab = case.logits.device, case.logits.shape[1]
    count = len(case.requests)
    room = room or count + 2
    places = case.places or [room - 1 - n for n in range(count)]
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
    if not case.logits.is_contiguous():  # a slice of a wider tensor, as it was
        wide = case.logits.new_zeros(len(logits), case.logits.stride(0))
        logits = wide[:, :vocab].copy_(case.logits)
    if case.drafts is None:
        return Half(sampler, logits, lambda: sampler(logits, batch), batch)
    config = SimpleNamespace(num_speculative_tokens=DRAFTS, rejection_sample_method="strict")
    rejecting = sides.rejection.RejectionSampler(sampler, config, device)
    return Half(sampler, logits, lambda: rejecting(logits, batch, case.draft_logits), batch)


def add(sampler: Any, place: int, request: dict[str, Any]) -> None:
    """Add a request, or put one in the place of another."""
    given = dict(request)
    words = given.pop("bad_words_token_ids", None)
    params = SamplingParams(**given)
    params._bad_words_token_ids = words
    sampler.add_request(place, len(PROMPT), params)


def _request_states(room: int, vocab: int, device: torch.device) -> Any:
    """What the samplers read of RequestState: every request has the same history."""
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
    """What the samplers read of InputBatch."""
    device = case.logits.device
    drafts = case.drafts or [[] for _ in places]
    rows = [row for row, ids in enumerate(drafts) for _ in [*ids, None]]
    local = [at for ids in drafts for at in range(len(ids) + 1)]
    tokens = [token for ids in drafts for token in [2, *ids]]
    at = np.array(places, dtype=np.int32)
    ends = np.cumsum([0, *(len(ids) + 1 for ids in drafts)]).astype(np.int32)

    def put(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values)).to(device, dtype)

    return SimpleNamespace(
        num_reqs=len(places),
        idx_mapping=put(at),
        idx_mapping_np=at,
        expanded_idx_mapping=put(at[rows]),
        expanded_local_pos=put(local),
        cu_num_logits=put(ends),
        cu_num_logits_np=ends,
        positions=put([6 + n for n in local], torch.int64),
        input_ids=put(tokens),
        logits_indices=put(np.arange(len(rows)), torch.int64),
        seq_lens=put([7] * len(places)),
    )


def compare(sides: Sides, case: Case) -> Half:
    """Sample on both sides, twice, which must give the same to the bit; our side."""
    stock, ours = (half(sides, module, case) for module in (sides.stock, sides.ours))
    for _ in range(2):
        for one in (stock, ours):
            one.logits.copy_(case.logits)
        same(ours.sample(), stock.sample())
    return ours


def same(one: Any, other: Any) -> None:
    """Tokens, their number, logprobs and ranks to the bit."""
    limit = torch.arange(other.sampled_token_ids.shape[1], device=other.num_sampled.device)
    written = limit < other.num_sampled[:, None]  # beyond it nothing is written
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
