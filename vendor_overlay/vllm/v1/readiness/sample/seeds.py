"""Feature ``seeds``: one launch draws the noise of a step's seeded requests, with torch's bits.

Upstream draws the noise of seeded requests with one call per generator: 128 launches per step for
128 requests, and three times as many with drafts. The state of a CUDA generator is a seed and an
offset, from which kernels compute torch's bits. Upstream still draws the noise of unseeded requests
first, with the same calls on the default generator.

Rows, seeds and offsets are sent when the batch has changed. All requests of a launch advance by the
same number of draws, which is a kernel argument, so nothing is sent while a batch decodes.

The offsets of the generators therefore lag: updating them in each draw would again take a call per
request. Instead, :class:`Generators` replaces the batch's dict, and updates a generator before any
method returns it. The caller may change the state, which is read again at the next draw. Removed,
moved and swapped rows, rewound offsets, upstream's loops and a user's sampler thus find each
generator in the same state as in upstream.

Code that stores a request's generator elsewhere could read a lagging offset, or draw unnoticed. No
class of vLLM does so. A runner class of another package falls back to upstream.

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

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.inputs import uploads

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

T = TypeVar("T")
#: Generators by row, as upstream keeps them.
Plain = dict[int, torch.Generator]
#: Words per draw; offsets count words.
_WORDS = 4
#: Threads per block of torch's kernels, and torch's threads per program of these kernels.
_BLOCK = 256
_LANES = 1024
#: vLLM's limit on the number of drafts per request.
_MOST_DRAFTS = 128
#: Seeds and offsets for which :func:`agree` compares bits, some of them beyond 32 bits.
_CASES = ((0, 0), (10**14 + 7, 4 * 1000), (2**63 + 12345, 4 * (2**32 - 1)))
#: Number of uniform values per case.
_COUNTS = (1, 5, _MOST_DRAFTS)


class Generators(dict[int, torch.Generator]):
    """Generators of a batch by row; each is brought up to date before it is returned."""

    def __init__(self, seeds: "Seeds", generators: Plain) -> None:
        super().__init__(generators)
        self.seeds = seeds

    def __getitem__(self, row: int) -> torch.Generator:
        self.seeds.give_back(row)
        return super().__getitem__(row)

    def __setitem__(self, row: int, generator: torch.Generator) -> None:
        self.seeds.give_back(row)
        self.seeds.change()
        super().__setitem__(row, generator)

    def __delitem__(self, row: int) -> None:
        self.seeds.give_back(row)
        super().__delitem__(row)

    def __iter__(self) -> Iterator[int]:
        return super().__iter__()  # if not overridden, dict() bypasses __getitem__

    def pop(self, row: int, *default: T) -> torch.Generator | T:
        """Remove and return a row's generator."""
        self.seeds.give_back(row)
        return super().pop(row, *default)

    def popitem(self) -> tuple[int, torch.Generator]:
        """Remove and return the last row and its generator."""
        row, generator = super().popitem()
        super().__setitem__(row, generator)
        return row, self.pop(row)

    def copy(self) -> Plain:
        """Return a plain dict with the same generators."""
        return dict(self.items())

    __copy__ = copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Plain], tuple[Plain]]:
        """Pickle and copy as a plain dict."""
        return dict, (self.copy(),)

    def __or__(self, other: Plain) -> Plain:  # type: ignore[override]
        return self.copy() | other

    def __ror__(self, other: Plain) -> Plain:  # type: ignore[override]
        return other | self.copy()

    def __ior__(self, other: Plain) -> "Generators":  # type: ignore[override]
        self.update(other)
        return self


for _name in ("clear", "get", "items", "setdefault", "update", "values"):
    # These call the methods above; dict's versions bypass them.
    setattr(Generators, _name, getattr(MutableMapping, _name))


@dataclass(slots=True)
class Sent:
    """Data on the device for the requests that one launch serves."""

    rows: np.ndarray  # [requests]
    #: Rows, seeds and counters, int64 [requests] each; with drafts, also the index of the
    #: request's first draft and its number of drafts.
    arrays: list[torch.Tensor]
    drafts: list[int] | None  # number of drafts per row; None to draw for all rows
    complete: bool  # all seeded requests of the batch are included
    behind: int = 0  # draws per thread since the counters were sent


class Seeds:
    """Seeded requests of one batch."""

    def __init__(self, batch: "InputBatch", draws: "Draws") -> None:
        self.draws = draws
        self.device = batch.device
        self.pin_memory = batch.pin_memory
        self.vocab_size = batch.vocab_size
        #: Whether the kernels draw torch's bits on this device; None before warm-up.
        self.agrees: bool | None = None
        self._runner_known = False
        self._generators = Generators(self, batch.generators)
        batch.generators = self._generators
        # By row: whether the generator is cached (its offset may lag), its seed and counter.
        self._kept = np.zeros(batch.max_num_reqs, np.bool_)
        self._seeds = np.zeros(batch.max_num_reqs, np.int64)
        self._counters = np.zeros(batch.max_num_reqs, np.int64)
        #: Rows of all generators; None unless all of them are cached.
        self._rows: np.ndarray | None = None
        self._end = 0
        self._sent: Sent | None = None

    @classmethod
    def make(cls, batch: "InputBatch") -> "Seeds | None":
        """Create the feature; None on an unsupported device."""
        draws = draws_on(batch.device)
        return None if draws is None else cls(batch, draws)

    def warm_up(self) -> None:
        """Compile the kernels and, once, compare their bits with torch's."""
        if self.agrees is not None:
            return
        reason = "different bits"
        try:
            self.agrees = agree(self.draws, self.device, [self.vocab_size])
        except Exception as error:  # Triton's compiler may not support the device
            self.agrees, reason = False, f"{type(error).__name__}: {error}"
        if not self.agrees:
            logger.warning_once(
                "Readiness overlay: random numbers of torch %s on %s are not as expected (%s). "
                "Falling back to vLLM for seeded requests, which takes one launch per request.",
                *(torch.__version__, self.device, reason),
            )

    def begin_sampling(self, runner: object) -> None:
        """Check whether the runner's class is part of vLLM; None counts as such a class."""
        self._runner_known = runner is None or type(runner).__module__.startswith("vllm.")

    def give_back(self, row: int) -> None:
        """Update the offset of a row's generator, and remove the generator from the cache."""
        if row in self._generators and self._kept[row]:
            self._kept[row] = False
            self.change()
            generator = dict.__getitem__(self._generators, row)
            generator.set_offset(int(self._counters[row]) * _WORDS)

    def change(self) -> None:
        """Invalidate the cached rows, and the data on the device."""
        self._rows = self._sent = None

    def draw(self, noise: torch.Tensor, drafts: Sequence[int] | None) -> bool:
        """Fill the rows of seeded requests in ``noise`` [rows, vocab]; False to fall back.

        ``drafts`` [rows] is the number of drafts per row. Rows without drafts are skipped, unless
        ``drafts`` is None.
        """
        fits = noise.dtype == torch.float32 and noise.dim() == 2
        return self._draw(self.draws.exponential, noise, drafts, fits, len(noise))

    def draw_uniform(self, values: torch.Tensor, drafts: Sequence[int]) -> bool:
        """Fill the ``values`` [drafts of all rows] of seeded requests; False to fall back."""
        fits = (
            len(self._generators) > 0
            and values.dtype == torch.float64
            and values.dim() == 1
            and max(drafts) <= self.draws.most_drafts
            and sum(drafts) == len(values)
        )
        return self._draw(self.draws.uniform, values, drafts, fits, len(drafts))

    def _draw(
        self,
        fill: Callable[[torch.Tensor, list[torch.Tensor], int], int],
        target: torch.Tensor,
        drafts: Sequence[int] | None,
        fits: bool,
        rows: int,
    ) -> bool:
        """Fill ``target`` and advance the counters; False to fall back to upstream."""
        if not self._generators:
            return False
        reason = ""
        if not self.agrees:
            reason = gauges.OTHER_BITS
        elif not self._runner_known:
            reason = gauges.OTHER_CLASS
        elif not (
            (fits and target.is_contiguous() and target.device == self.device)
            and (self._keep() and self._end <= rows)
        ):
            reason = gauges.OTHER_INPUT
        if reason:
            gauges.fall_back(registry.SEEDS, reason)
            return False
        sent = self._send(drafts)
        if len(sent.rows):
            draws = fill(target, sent.arrays, sent.behind)
            sent.behind += draws
            self._counters[sent.rows] += draws
        return True

    def _keep(self) -> bool:
        """Cache all generators; return False if any of them is not supported."""
        if self._rows is not None:
            return True
        known = dict.items(self._generators)
        if len({id(generator) for _, generator in known}) < len(known):
            return False
        for row, generator in known:
            if self._kept[row]:
                continue
            if type(generator) is not torch.Generator or generator.device != self.device:
                return False
            offset = generator.get_offset()
            if offset % _WORDS:
                return False
            self._counters[row] = offset // _WORDS
            self._seeds[row] = np.uint64(generator.initial_seed()).astype(np.int64)
            self._kept[row] = True
        self._rows = np.fromiter(self._generators, np.int64, len(known))
        self._end = int(self._rows.max()) + 1
        return True

    def _send(self, drafts: Sequence[int] | None) -> Sent:
        """Return the data of seeded requests on the device; send it if it has changed."""
        sent, rows = self._sent, self._rows
        assert rows is not None
        if sent is not None and (sent.complete if drafts is None else sent.drafts == drafts):
            return sent
        arrays = []
        if drafts is not None:
            counts = np.array(drafts)
            rows = rows[counts[rows] > 0]
            firsts = counts.cumsum() - counts
            arrays = [firsts[rows], counts[rows]]
        arrays = [rows, self._seeds[rows], self._counters[rows], *arrays]
        self._sent = Sent(
            rows,
            uploads.together(arrays, (), self.device, self.pin_memory)[0],
            None if drafts is None else list(drafts),
            complete=len(rows) == len(self._generators),
        )
        return self._sent


def draw(
    generators: Plain, noise: torch.Tensor, drafts: Sequence[int] | None = None
) -> bool | None:
    """Draw the noise of seeded requests by :meth:`Seeds.draw`; None to fall back."""
    if type(generators) is Generators and generators.seeds.draw(noise, drafts):
        return True
    return None


def draw_uniform(generators: Plain, values: torch.Tensor, drafts: Sequence[int]) -> bool | None:
    """Draw uniform values by :meth:`Seeds.draw_uniform`; None to fall back."""
    if type(generators) is Generators and generators.seeds.draw_uniform(values, drafts):
        return True
    return None


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


def draws_on(device: torch.device) -> Draws | None:
    """Create the draws of a device; None if unsupported. Tests replace this function."""
    cuda = HAS_TRITON and device.type == "cuda" and current_platform.is_cuda()
    return Draws.on(device) if cuda else None


def agree(draws: Draws, device: torch.device, sizes: Iterable[int]) -> bool:
    """Return whether torch draws the same bits; compiles the kernels and syncs with the device.

    Rows of the given ``sizes`` are compared, of a short one, and of one with two draws per thread.
    Tests replace this function.
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
        uniform = word.to(tl.float32) * 2.0**-32 + 2.0**-33
        near_one = uniform >= 1.0 - 2.0**-24
        value = tl.where(near_one, 2.0**-24, -(lg2(uniform) * 0.693147182464599609375))
        element = first + lane
        tl.store(noise + element, value, mask=(lane < threads) & (element < size))


@triton.jit(do_not_specialize=["behind", "size", "threads"])
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
    value = bits.to(tl.float64) * 2.0**-53 + 2.0**-54
    value = tl.where(value == 1.0, 0.0, value)
    inside = lane < tl.load(counts + request)
    tl.store(values + tl.load(firsts + request) + lane, value, mask=inside)
