"""Triton kernels that draw a seeded request's random numbers with the same bits as torch.

On CUDA, torch fills n elements with G threads. G is n rounded up to a multiple of 256, but at most
the number of threads that the device can hold at once. Each thread applies Philox4x32-10, keyed
with the seed, to a counter. The high half of the counter is the thread's index. The low half counts
draws, starting from a quarter of the generator's offset, which grows by four per draw of a thread.
A draw of thread t gives the words for elements t, t + G, t + 2G and t + 3G; the next draw continues
at t + 4G.

exponential_ (float32) uses one word per element; uniform_ (float64) makes two numbers of four
words. These rules are from PyTorch 2.11's DistributionTemplates.h and cuRAND's headers.
:func:`agree` checks them for the installed torch and device.
"""

# mirrors: vllm.v1.sample.ops.topk_topp_sampler:random_sample
# mirrors: vllm.v1.sample.rejection_sampler:generate_uniform_probs
# mirrors: vllm.v1.sample.rejection_sampler:sample_recovered_tokens

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

#: Threads per block of torch's kernels, and torch's threads per program of these kernels.
_BLOCK = 256
_LANES = 1024
#: vLLM's limit on the number of drafts per request.
_MOST_DRAFTS = 128

_TWO_POW_M24 = tl.constexpr(2.0**-24)
_TWO_POW_M32 = tl.constexpr(2.0**-32)
_TWO_POW_M33 = tl.constexpr(2.0**-33)
_TWO_POW_M53 = tl.constexpr(2.0**-53)
_TWO_POW_M54 = tl.constexpr(2.0**-54)
_LN_2 = tl.constexpr(0.693147182464599609375)  # as a float32

#: Seeds and offsets for which :func:`agree` compares bits, some of them beyond 32 bits.
_CASES = ((0, 0), (10**14 + 7, 4 * 1000), (2**63 + 12345, 4 * (2**32 - 1)))
#: Number of uniform values per case.
_COUNTS = (1, 5, _MOST_DRAFTS)
_ARGUMENTS = ["behind", "size", "threads"]


@triton.jit
def lg2(value):
    """Compute the GPU's approximation of the logarithm to base 2."""
    return tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def philox(seed, counter, thread):
    """Compute Philox4x32-10 with an int64 ``seed`` as the key; return four uint32 blocks.

    The counter's low half is ``counter`` (int64), its high half ``thread`` (int32 block).
    """
    c = thread.to(tl.uint32)
    d = c & 0
    a = d + counter.to(tl.uint32)
    b = d + (counter >> 32).to(tl.uint32)
    low = d + seed.to(tl.uint32)
    high = d + (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        upper_a = tl.umulhi(a, 0xD2511F53)
        lower_a = a * 0xD2511F53
        upper_c = tl.umulhi(c, 0xCD9E8D57)
        lower_c = c * 0xCD9E8D57
        a = upper_c ^ b ^ low
        b = lower_c
        c = upper_a ^ d ^ high
        d = lower_a
        low += 0x9E3779B9
        high += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _store_exponential(noise, first, lane, word, size, threads):
    """Store one value per thread of torch, beginning at the element ``first``."""
    if first < size:
        uniform = word.to(tl.float32) * _TWO_POW_M32 + _TWO_POW_M33
        near_one = uniform >= 1.0 - _TWO_POW_M24
        value = tl.where(near_one, _TWO_POW_M24, -(lg2(uniform) * _LN_2))
        element = first + lane
        tl.store(noise + element, value, mask=(lane < threads) & (element < size))


@triton.jit(do_not_specialize=_ARGUMENTS)
def exponential_kernel(
    noise,  # float32 [at least the largest row + 1, size]
    rows,  # int64 [requests]: row of each request in noise
    seeds,  # int64 [requests]
    counters,  # int64 [requests]
    behind,  # draws per thread since the counters were sent
    size,
    threads,
    LANES: tl.constexpr,
):
    """Fill part of a request's row; grid [requests, blocks of threads, draws per thread]."""
    request = tl.program_id(0)
    draw = tl.program_id(2)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    counter = tl.load(counters + request) + behind + draw
    a, b, c, d = philox(tl.load(seeds + request), counter, lane)
    row = noise + tl.load(rows + request) * size
    first = draw * 4 * threads
    _store_exponential(row, first, lane, a, size, threads)
    _store_exponential(row, first + threads, lane, b, size, threads)
    _store_exponential(row, first + 2 * threads, lane, c, size, threads)
    _store_exponential(row, first + 3 * threads, lane, d, size, threads)


@triton.jit(do_not_specialize=["behind"])
def uniform_kernel(
    values,  # float64 [drafts of all requests]
    firsts,  # int64 [requests]: index of each request's first draft
    counts,  # int64 [requests]: number of drafts per request, at most LANES
    seeds,  # int64 [requests]
    counters,  # int64 [requests]
    behind,
    LANES: tl.constexpr,
):
    """Draw a number in [0, 1) per draft of one request; grid [requests]."""
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    counter = tl.load(counters + request) + behind
    a, b, _, _ = philox(tl.load(seeds + request), counter, lane)
    bits = a.to(tl.uint64) ^ (b.to(tl.uint64) << 21)
    value = bits.to(tl.float64) * _TWO_POW_M53 + _TWO_POW_M54
    value = tl.where(value == 1.0, 0.0, value)
    inside = lane < tl.load(counts + request)
    tl.store(values + tl.load(firsts + request) + lane, value, mask=inside)


class Draws:
    """Torch's random numbers on a device where ``most_threads`` threads fill a large tensor."""

    most_drafts = _MOST_DRAFTS

    def __init__(self, most_threads: int) -> None:
        self.most_threads = most_threads

    @classmethod
    def on(cls, device: torch.device) -> "Draws":
        """Create the draws for a CUDA device."""
        traits = torch.cuda.get_device_properties(device)
        blocks = traits.max_threads_per_multi_processor // _BLOCK
        return cls(_BLOCK * traits.multi_processor_count * blocks)

    def exponential(self, noise: torch.Tensor, sent: Sequence[torch.Tensor], behind: int) -> int:
        """Fill rows of contiguous float32 ``noise`` [rows, size] like exponential_.

        ``sent`` is the rows, seeds and counters of the requests, int64 [requests] each. ``behind``
        is the number of draws per thread since the counters were sent. Returns the number of draws
        per thread in this call, which the caller adds to the counters.
        """
        size = noise.shape[1]
        threads = min(self.most_threads, _BLOCK * triton.cdiv(size, _BLOCK))
        draws: int = triton.cdiv(size, 4 * threads)
        grid = (len(sent[0]), triton.cdiv(threads, _LANES), draws)
        # Fusion is disabled because each product must be rounded.
        exponential_kernel[grid](
            *(noise, *sent[:3], behind, size, threads), LANES=_LANES, enable_fp_fusion=False
        )
        return draws

    def uniform(self, values: torch.Tensor, sent: Sequence[torch.Tensor], behind: int) -> int:
        """Fill float64 ``values`` [drafts of all requests] like uniform_.

        Like :meth:`exponential`, but ``sent`` also has each request's first draft and draft count.
        """
        _, seeds, counters, firsts, counts = sent
        arguments = (values, firsts, counts, seeds, counters, behind)
        uniform_kernel[(len(seeds),)](*arguments, LANES=_MOST_DRAFTS, enable_fp_fusion=False)
        return 1


def agree(draws: Draws, device: torch.device, sizes: Iterable[int]) -> bool:
    """Return whether torch draws the same bits; compiles the kernels and syncs with the device.

    Rows of the given ``sizes`` are compared, of a short one, and of one with two draws per thread.
    """
    for size in {*sizes, 997, 4 * draws.most_threads + 1}:
        rows = torch.empty(len(_CASES), size, device=device)
        if not _agrees(draws.exponential, torch.Tensor.exponential_, rows, [1] * len(_CASES)):
            return False
    values = torch.empty(sum(_COUNTS), dtype=torch.float64, device=device)
    return _agrees(draws.uniform, torch.Tensor.uniform_, values, _COUNTS)


def _agrees(
    draw: Callable[..., int],
    original: Callable[..., object],
    values: torch.Tensor,
    counts: Sequence[int],
) -> bool:
    """Compare one distribution, for ``counts`` rows or values per case."""
    device = values.device
    generators = [_generator(device, *case) for case in _CASES]
    for part, generator in zip(values.split(counts), generators, strict=True):
        original(part, generator=generator)
    drawn = torch.empty_like(values)
    grown = draw(drawn, _send_cases(device, counts), 0)
    offsets = [generator.get_offset() for generator in generators]
    return offsets == [offset + 4 * grown for _, offset in _CASES] and bool(
        torch.equal(drawn.view(torch.int32), values.view(torch.int32))
    )


def _generator(device: torch.device, seed: int, offset: int) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    generator.set_offset(offset)
    return generator


def _send_cases(device: torch.device, counts: Sequence[int]) -> list[torch.Tensor]:
    seeds = np.array([seed for seed, _ in _CASES], np.uint64).view(np.int64)
    counters = np.array([offset // 4 for _, offset in _CASES])
    many = np.array(counts)
    arrays = (np.arange(len(_CASES)), seeds, counters, many.cumsum() - many, many)
    return [torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays]
