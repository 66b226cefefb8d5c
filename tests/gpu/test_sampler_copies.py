"""The samplers without needless copies, on a GPU, against upstream's."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from gpu.waits import errors_for_waits
from support import mrv2, sampling

pytestmark = pytest.mark.gpu

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
VOCABULARIES = (1009, 32000, 151936)

#: Settings that change a request's logits; ids below 1,000.
ASKS: list[dict[str, Any]] = [
    {"bad_words_token_ids": [[7], [9, 2, 5]]},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"frequency_penalty": -0.5},
    {"allowed_token_ids": [0, 5, 11, 500]},
    {"min_tokens": 8, "stop_token_ids": [3, 8, 12]},
    {"logit_bias": {2: 4.0, 17: -100.0}},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.1},
]
GREEDY, RANDOM = {"temperature": 0.0}, {"temperature": 1.0}
#: Name to settings, which requests have in turn; the first six change no logits.
MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "random": [RANDOM],
    "greedy and random": [GREEDY, RANDOM],
    "greedy, logprobs": [GREEDY | {"logprobs": 5}, GREEDY],
    "random, logprobs": [RANDOM | {"logprobs": 5}, GREEDY | {"logprobs": 0}],
    "chosen logprobs": [RANDOM | {"logprob_token_ids": [1, 40]}, GREEDY],
    "temperature": [{"temperature": 0.7}],
    "top_p": [RANDOM | {"top_p": 0.9}],
    "top_k": [RANDOM | {"top_k": 20}],
    "one with top_p": [RANDOM | {"top_p": 0.5}, *[RANDOM, GREEDY] * 32],
    "nine with something": [*[RANDOM | ask for ask in ASKS[:9]], *[RANDOM, GREEDY] * 32],
    "a few, logprobs": [*[RANDOM | ask for ask in ASKS[:3]], *[RANDOM | {"logprobs": 3}] * 40],
    "everything": [RANDOM | ask for ask in ASKS] + [GREEDY | ask for ask in ASKS] + [RANDOM],
}


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int, padded: bool) -> torch.Tensor:
    """Draw logits with ties and infinities, as a slice of a wider tensor if ``padded``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    wide = torch.randn((rows, vocab + 64 * padded), device="cuda", generator=generator) * 6
    wide[:, :200] = wide[:, :200].round()
    wide[:, 300:320] = -torch.inf
    wide[0] = wide[0].round()
    return wide.to(dtype)[:, :vocab]


def a_case(mix: str, vocab: int, dtype: torch.dtype, seed: int, **named: Any) -> mrv2.Case:
    asks, rows = MIXES[mix], named.pop("rows", 70)
    padded = named.pop("padded", False)
    requests = [asks[row % len(asks)] for row in range(rows)]
    random.Random(seed).shuffle(requests)
    drafts = named.pop("drafts", None)
    positions = rows + sum(map(len, drafts or ()))
    logits = logits_of(positions, vocab, dtype, seed, padded)
    return mrv2.Case(requests, logits, drafts=drafts, **named)


@pytest.mark.parametrize("mix", list(MIXES))
def test_mrv2_samples_the_same(mix: str) -> None:
    """For every dtype, logprobs mode, layout and precision of noise."""
    sides = mrv2.real()
    for seed, dtype in enumerate((B16, F16, F32)):
        for vocab in VOCABULARIES:
            for mode in ("raw_logprobs", "processed_logprobs"):
                mrv2.compare(sides, a_case(mix, vocab, dtype, seed, mode=mode))
        mrv2.compare(sides, a_case(mix, 32000, dtype, seed, fp64=True))
        mrv2.compare(sides, a_case(mix, 32000, dtype, seed, padded=True))
        mrv2.compare(sides, a_case(mix, 1009, dtype, seed, rows=5))


@pytest.mark.parametrize("mix", list(MIXES))
def test_mrv2_verifies_drafts_the_same(mix: str) -> None:
    """Certain drafts and drafts with logits; many of them are accepted."""
    sides = mrv2.real()
    if any("logprob_token_ids" in ask for ask in MIXES[mix]):
        pytest.skip("upstream's rejection sampler has no chosen logprobs")
    accepted = 0
    for seed, dtype in enumerate((B16, F16, F32)):
        for vocab in (1009, 151936):
            rows = 12
            drafts = [[5] * (row % (mrv2.DRAFTS + 1)) for row in range(rows)]
            case = a_case(mix, vocab, dtype, seed, rows=rows, drafts=drafts)
            best = iter(case.logits.argmax(-1).tolist())
            for ids in drafts:
                ids[:] = [next(best) for _ in ids]
                next(best)
            draft_logits = torch.randn((rows + 2, mrv2.DRAFTS, vocab), device="cuda") * 6
            for certain_or_drawn in (None, draft_logits):
                case.draft_logits = certain_or_drawn
                result = mrv2.compare(sides, case).sample()
                accepted += int(result.num_sampled.sum()) - rows
    assert accepted > 0


def test_mrv2_counts_nans_and_leaves_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = mrv2.real()
    case = a_case("greedy", 32000, B16, 1)
    case.logits[3, 5] = case.logits[3, 700] = torch.nan
    results = []
    for module in (sides.stock, sides.ours):
        one = mrv2.under_test(sides, module, case)
        one.sampler.compute_nans = True
        results.append(one.sample().num_nans)
        assert torch.equal(one.logits.nan_to_num(), case.logits.nan_to_num())
    assert torch.equal(*results)
    assert results[0][3] == 2


def test_mrv2_rows_with_nans_sample_the_same() -> None:
    """Their tokens depend on the order of a reduction, and that on the dtype loaded.

    So those of other dtypes are a known difference (docs/features.md).
    """
    sides = mrv2.real()
    for mix in ("greedy", "random"):
        case = a_case(mix, 32000, F32, 2)
        columns = torch.randint(0, 32000, (70, 9), device="cuda")
        case.logits.scatter_(1, columns, torch.nan)
        mrv2.compare(sides, case)


def test_mrv2_takes_no_copy_of_untouched_logits() -> None:
    """Peak memory of one call on logits of 156 MB."""
    sides = mrv2.real()
    peaks = []
    for module in (sides.stock, sides.ours):
        one = mrv2.under_test(sides, module, a_case("random", 151936, B16, 0, rows=512))
        one.sample()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one.sample()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    copy = 512 * 151936 * 4
    assert peaks[0] >= copy
    assert peaks[1] < copy / 10


@pytest.mark.parametrize("mix", ["random", "one with top_p"])
def test_mrv2_does_not_wait(mix: str) -> None:
    """Under torch's sync debug mode, where any wait is an error; a new batch included."""
    sides = mrv2.real()
    one = mrv2.under_test(sides, sides.ours, a_case(mix, 32000, B16, 0))
    one.sample()
    one.sampler.readiness._batch = None
    torch.cuda.synchronize()
    with errors_for_waits():
        one.sample()


def test_mrv2_kernels_are_compiled_in_the_dummy_run() -> None:
    """For logits in their own dtype, which the profile run does not sample from."""
    sides = mrv2.real()
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as verify

    kernels = [
        gumbel._gumbel_sample_kernel,
        verify._compute_block_stats_kernel,
        verify._rejection_kernel,
        verify._resample_kernel,
        verify._insert_resampled_kernel,
    ]
    for kernel in kernels:
        kernel.device_caches.clear()

    def compiled() -> int:
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())

    asks, logits = [GREEDY, GREEDY], logits_of(4, 50257, B16, 0, padded=False)
    drafted = mrv2.under_test(sides, sides.ours, mrv2.Case(asks, logits, drafts=[[5], [6]]))
    undrafted = mrv2.under_test(sides, sides.ours, mrv2.Case(asks, logits[:2]))
    unknown = np.array([0, 1], dtype=np.int32)
    drafted.sampler.readiness.decide(logits[:2], unknown)
    assert compiled() == len(kernels)
    drafted.sample()
    undrafted.sample()
    assert compiled() == len(kernels)


def test_v1_samples_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """For random mixes of all settings, with and without drafts.

    Never for a single row: there upstream's top-p sums in no fixed order.
    """
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    chooser = random.Random(5)
    for number in range(150):
        vocab = chooser.choice([1009, 32000])
        temperatures: list[float] = chooser.choice([[0.0], [1.0], [0.0, 1.0], [0.0, 1.0, 0.7]])
        logprobs: list[int | None] = chooser.choice([[None], [None, 0, 5], [-1]])
        touched, drafted = chooser.random() < 0.5, chooser.random() < 0.4
        requests = []
        for _ in range(chooser.randrange(2, 12)):
            request: dict[str, Any] = {"temperature": chooser.choice(temperatures)}
            request["logprobs"] = chooser.choice(logprobs)
            if request["temperature"] and chooser.random() < 0.3:
                request["seed"] = 11
            if touched and chooser.random() < 0.5:
                request |= {k: v for k, v in chooser.choice(ASKS).items() if k != "min_p"}
            requests.append(request)
        drafts = None
        if drafted:
            drafts = [[chooser.randrange(9)] * chooser.randrange(3) for _ in requests]
            drafts[0] = [3, 4]
        dtype = chooser.choice([B16, F16, F32])
        rows = len(requests) + sum(map(len, drafts or ()))
        logits = logits_of(rows, vocab, dtype, number, padded=False)
        mode = chooser.choice(sampling.MODES)
        sampling.compare(sampling.Case(requests, logits, mode, drafts))


@pytest.mark.parametrize("dtype", [B16, F16])
def test_the_first_of_the_largest_is_the_same_in_float32(dtype: torch.dtype) -> None:
    """V1's greedy sampling depends on it, for every kind of number, NaNs included."""
    for vocab in (1, 7, 1000, 32000, 151936):
        for rows in (1, 3, 130):
            bits = torch.randint(-(2**15), 2**15, (rows, vocab), device="cuda").to(torch.int16)
            few = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1, 1], device="cuda")
            ties = few.to(dtype)[torch.randint(0, 7, (rows, vocab), device="cuda")]
            finite = torch.randn((rows, vocab), device="cuda").mul(4).round().to(dtype)
            for logits in (bits.view(dtype), ties, finite):
                assert torch.equal(logits.argmax(-1), logits.float().argmax(-1))
