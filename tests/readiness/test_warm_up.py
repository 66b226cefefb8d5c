"""The feature warm-up: what requests can reach is compiled before the engine is ready."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import batches, launches, modules
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.sample import warm_up
from vllm.v1.sample import sampler as stock_sampler
from vllm.v1.spec_decode import utils as spec_decode_utils
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

WORKER = "vllm/v1/worker/gpu_worker.py"
VOCABULARY = 211
REQUESTS = 40
DRAFTS = 3
HIDDEN = 8
#: Modules whose kernels are launched.
PARTS = (
    "vllm.v1.worker.block_table",
    "vllm.v1.worker.utils",
    "vllm.v1.worker.mamba_utils",
    "vllm.v1.sample.ops.topk_topp_triton",
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.sample.sampler",
    "vllm.v1.sample.rejection_sampler",
    "xgrammar.kernels.apply_token_bitmask_inplace_triton",
)
#: Function of vLLM's that torch.compile compiles.
CORRECT = "update_num_computed_tokens_for_batch_change"
#: A platform for which TopKTopPSampler takes Triton's kernel and no library.
NEITHER = SimpleNamespace(is_cpu=bool, is_cuda=bool, is_xpu=bool)
#: Parameters of the requests of a batch.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5, "logprobs": 0},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.5},
]


class Compilations:
    """A backend of torch.compile that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.count += 1
        return graph.forward

    def of(self, function: Any, **options: Any) -> Any:
        """Compile the original of a compiled function with this backend."""
        return torch.compile(function._torchdynamo_orig_callable, backend=self, **options)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """The compilations of the functions that vLLM compiles beside its model."""
    torch._dynamo.reset()
    count = Compilations()
    compiled = count.of(getattr(spec_decode_utils, CORRECT), dynamic=True)
    monkeypatch.setattr(warm_up, CORRECT, compiled)
    ranks = "batched_count_greater_than"
    monkeypatch.setattr(stock_sampler, ranks, count.of(getattr(stock_sampler, ranks)))
    return count


class Buffer:
    """A buffer of the runner, on the host."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self.gpu = self.cpu = torch.zeros(size, dtype=dtype)


class Runner(SimpleNamespace):
    """Runner with the attributes that the warm-up reads; batch, samplers and kernels are vLLM's."""

    def __init__(self, requests: int = REQUESTS, drafts: int = DRAFTS) -> None:
        found = {name: importlib.import_module(name) for name in PARTS}
        tables = found["vllm.v1.worker.block_table"].MultiGroupBlockTable(
            *(requests, 512, 256, False, torch.device("cpu")),
            block_sizes=[16, 24],
            kernel_block_sizes=[16, 24],
        )
        sampler = found["vllm.v1.sample.sampler"].Sampler()
        sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
        zeroer = found["vllm.v1.worker.utils"].KVBlockZeroer(torch.device("cpu"), False)
        zeroer._id_cap = 64
        zeroer._ids_pinned, zeroer._ids_gpu = torch.zeros(2, 64, dtype=torch.int64)
        zeroer._meta = (torch.zeros(4, dtype=torch.uint64), 4096, 1024, 4)
        config = SimpleNamespace(
            multimodal_config=None, dtype=torch.bfloat16, get_hidden_size=lambda: HIDDEN
        )
        speculative = SimpleNamespace(draft_sample_method="probabilistic")
        super().__init__(
            device=torch.device("cpu"),
            max_num_reqs=requests,
            max_num_tokens=256,
            num_spec_tokens=drafts,
            use_async_spec_decode=drafts > 0,
            is_pooling_model=False,
            model_config=config,
            cache_config=SimpleNamespace(mamba_cache_mode="align"),
            speculative_config=speculative if drafts else None,
            input_batch=SimpleNamespace(block_table=tables, vocab_size=VOCABULARY),
            model=SimpleNamespace(compute_logits=self.compute_logits),
            query_start_loc=Buffer(requests + 1),
            positions=torch.zeros(256, dtype=torch.int64),
            num_computed_tokens=torch.arange(requests, dtype=torch.int32),
            num_accepted_tokens=Buffer(requests),
            prev_positions=Buffer(requests, torch.int64),
            prev_num_draft_tokens=Buffer(requests),
            sampler=sampler,
            rejection_sampler=found["vllm.v1.sample.rejection_sampler"].RejectionSampler(sampler),
            _zero_block_ids=zeroer.zero_block_ids,
            _get_mamba_bufs=lambda: SimpleNamespace(preprocess=self.copies),
            copies=SimpleNamespace(
                src_ptrs=Buffer(64, torch.int64),
                dst_ptrs=Buffer(64, torch.int64),
                sizes=Buffer(64),
            ),
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dtype == torch.bfloat16
        padded = torch.randn(len(hidden), VOCABULARY + 7).to(torch.bfloat16)
        return padded[:, :VOCABULARY]


@pytest.fixture
def variants(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> Iterator[set[launches.Variant]]:
    """The variants of kernels that are launched, as on a GPU."""
    with launches.recorded(*PARTS) as seen:
        topk = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
        monkeypatch.setattr(topk, "current_platform", NEITHER)
        kernels = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton")
        monkeypatch.setattr(kernels, "num_compute_units", lambda _: 132)
        rejection = importlib.import_module("vllm.v1.sample.rejection_sampler")
        expand = rejection.expand_batch_to_tokens
        monkeypatch.setattr(
            rejection,
            "expand_batch_to_tokens",
            lambda x, *args, **named: expand(x, *args, **named).fill_(
                1
            ),  # which the kernel would write
        )
        ranks = stock_sampler.batched_count_greater_than
        module = importlib.import_module("vllm.v1.sample.sampler")
        monkeypatch.setattr(module, "batched_count_greater_than", ranks)
        traits = SimpleNamespace(multi_processor_count=132, gcnArchName="")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: traits)
        from vllm.v1.structured_output.utils import xgr

        masks = importlib.import_module("xgrammar.kernels.apply_token_bitmask_inplace_triton")
        apply = masks.apply_token_bitmask_inplace_triton
        assert xgr.apply_token_bitmask_inplace  # loads the library, which replaces what was set
        monkeypatch.setattr(xgr, "apply_token_bitmask_inplace", apply)
        group = SimpleNamespace(is_last_rank=True)
        monkeypatch.setattr(warm_up, "get_pp_group", lambda: group)
        yield seen


def compile_kernels(runner: Any) -> None:
    warm_up.WarmUp().compile(runner)


def prepare(runner: Any, size: int) -> None:
    """The inputs of a step of ``size`` tokens, and of one with ``size`` new blocks."""
    runner.input_batch.block_table.compute_slot_mapping(
        1, runner.query_start_loc.gpu[:2], runner.positions[:size]
    )
    runner._zero_block_ids(list(range(size)))
    utils = importlib.import_module("vllm.v1.worker.mamba_utils")
    utils.do_mamba_copy_block(
        SimpleNamespace(
            offset=size,
            **{
                name: SimpleNamespace(copy_to_gpu=lambda n, buffer=buffer: buffer.gpu[:n])
                for name, buffer in vars(runner.copies).items()
            },
        )
    )


def metadata(size: int, params: dict[str, Any], seeded: bool) -> Any:
    """The metadata that vLLM makes of a batch."""
    batch = batches.empty(modules.pristine, VOCABULARY, max_num_reqs=REQUESTS)
    batches.fill(batch, [batches.Spec([1, 2], [3], params)] * size)
    if seeded:
        batch.sampling_metadata.generators = {0: torch.Generator().manual_seed(1)}
    return batch.sampling_metadata


def sample(runner: Any, size: int) -> None:
    """A step of ``size`` requests without drafts, and the logprobs of a prompt."""
    for params, seeded in itertools.product(PARAMS, (False, True)):
        logits = runner.compute_logits(torch.zeros(size, HIDDEN, dtype=torch.bfloat16))
        runner.sampler(logits=logits, sampling_metadata=metadata(size, params, seeded))
    scores = runner.sampler.compute_logprobs(logits)
    runner.sampler.gather_logprobs(scores, 3, torch.zeros(size, dtype=torch.int64))


def verify(runner: Any, size: int) -> None:
    """Steps of ``size`` requests with drafts."""
    most = runner.num_spec_tokens
    for lengths in ([1] * size, [most] * size, [most] + [0] * (size - 1)):
        drafts = SpecDecodeMetadata.make_dummy([[5] * n for n in lengths], torch.device("cpu"))
        positions = sum(lengths)
        for params in PARAMS:
            logits = torch.randn(positions + size, VOCABULARY).to(torch.bfloat16)
            probabilities = torch.ones(positions, VOCABULARY)
            for given in (None, probabilities):
                facts = metadata(size, params, False)
                runner.rejection_sampler(drafts, given, logits, facts)


def mask(runner: Any, size: int) -> None:
    """Masks of ``size`` requests of all, or of more."""
    from vllm.v1.structured_output.utils import apply_grammar_bitmask

    words = -(-VOCABULARY // 32)
    for requests in (size, size + 1):
        logits = runner.compute_logits(torch.zeros(requests, HIDDEN, dtype=torch.bfloat16))
        names = [f"r{row}" for row in range(requests)]
        output: Any = SimpleNamespace(
            structured_output_request_ids=names[:size],
            grammar_bitmask=torch.zeros(size, words, dtype=torch.int32).numpy(),
        )
        scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens={})
        batch: Any = SimpleNamespace(req_ids=names)
        with mock.patch.object(torch.Tensor, "is_cpu", False):
            apply_grammar_bitmask(scheduled, output, batch, logits)


def correct(runner: Any, size: int) -> None:
    """The computed tokens of ``size`` requests, after steps of other sizes."""
    for previous in (1, size, REQUESTS):
        vars(warm_up)[CORRECT](
            runner.num_computed_tokens,
            runner.num_accepted_tokens.gpu[:size],
            runner.prev_positions.gpu[:size],
            torch.zeros(previous, dtype=torch.int32),
            runner.prev_num_draft_tokens.gpu,
            torch.zeros(size, dtype=torch.int32),
        )


SERVED: dict[str, tuple[Callable[[Any, int], None], set[str]]] = {
    "inputs": (
        prepare,
        {"_compute_slot_mapping_kernel", "_zero_kv_blocks_kernel", "batch_memcpy_kernel"},
    ),
    "samplers": (sample, {"_topk_topp_kernel"}),
    "drafts": (
        verify,
        {
            "_topk_topp_kernel",
            "expand_kernel",
            "rejection_greedy_sample_kernel",
            "rejection_random_sample_kernel",
            "sample_recovered_tokens_kernel",
        },
    ),
    "masks": (mask, {"apply_token_bitmask_inplace_kernel"}),
    "counts": (correct, set()),
}
#: Numbers of requests, or of tokens.
SIZES = (1, 2, 8, 15, 16, 17, 32, REQUESTS)


@pytest.mark.parametrize("name", SERVED)
def test_each_variant_that_a_step_launches_is_compiled(
    name: str,
    variants: set[launches.Variant],
    compilations: Compilations,
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    serve, kernels = SERVED[name]
    runner = Runner()
    before = runner.num_computed_tokens.clone()
    compile_kernels(runner)
    assert not [r for r in caplog_vllm.records if r.levelname == "WARNING"]
    assert torch.equal(runner.num_computed_tokens, before)
    warmed, compiled = set(variants), compilations.count
    variants.clear()
    with torch.inference_mode():
        for size in SIZES:
            serve(runner, size)
    assert {kernel.rpartition(".")[2] for kernel, _ in variants} == kernels
    assert variants <= warmed
    assert compilations.count == compiled > 0


@pytest.mark.parametrize(("requests", "drafts"), [(1, 0), (2, 0), (8, 0), (12, 1), (2, 3)])
def test_small_engines_launch_no_more_than_they_can_serve(
    requests: int, drafts: int, variants: set[launches.Variant], compilations: Compilations
) -> None:
    """The variants of top_k and top_p, which take longest to compile, are those of its steps."""
    runner = Runner(requests, drafts)
    compile_kernels(runner)
    warmed = {each for each in variants if "topk" in each[0]}
    variants.clear()
    with torch.inference_mode():
        for size in sorted({1, min(9, requests), requests}):
            sample(runner, size)
            if drafts:
                verify(runner, size)
    assert {each for each in variants if "topk" in each[0]} == warmed
    assert compilations.count


def test_a_part_that_fails_is_logged_and_the_others_are_compiled(
    variants: set[launches.Variant], caplog_vllm: pytest.LogCaptureFixture
) -> None:
    runner = Runner()

    def refuse(**_: object) -> None:
        raise TypeError("no metadata")

    runner.sampler = refuse
    compile_kernels(runner)
    (warning,) = [r for r in caplog_vllm.records if r.levelname == "WARNING"]
    assert "sample failed in the warm-up (TypeError: no metadata)" in warning.getMessage()
    names = {kernel.rpartition(".")[2] for kernel, _ in variants}
    assert names >= {"expand_kernel", "apply_token_bitmask_inplace_kernel"}


@pytest.mark.parametrize("change", ["not last", "pooling", "encoder"])
def test_ranks_and_models_that_do_not_sample_compile_inputs_alone(
    change: str, variants: set[launches.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner()
    if change == "not last":
        group = SimpleNamespace(is_last_rank=False)
        monkeypatch.setattr(warm_up, "get_pp_group", lambda: group)
    runner.is_pooling_model = change == "pooling"
    if change == "encoder":
        runner.model_config.multimodal_config = SimpleNamespace(mm_encoder_only=True)
    compile_kernels(runner)
    assert {kernel.rpartition(".")[2] for kernel, _ in variants} == SERVED["inputs"][1]


def test_it_is_made_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches.empty(modules.overlaid, VOCABULARY)
    live = batch.readiness
    assert registry.WARM_UP in live.on
    assert live.kernels is None
    device = torch.device("cuda")
    cuda: Any = SimpleNamespace(device=device, max_num_reqs=1, is_pooling_model=False)
    assert warm_up.WarmUp.make(cuda, 0) is None
    monkeypatch.setattr(warm_up, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert warm_up.WarmUp.make(batch, 0) is None
    assert isinstance(warm_up.WarmUp.make(cuda, 0), warm_up.WarmUp)
    kept: Any = warm_up.WarmUp()
    monkeypatch.setattr(warm_up.WarmUp, "make", lambda *_: kept)
    assert batches.empty(modules.overlaid, VOCABULARY).readiness.kernels is kept
    monkeypatch.setenv(switch.NAME, "-warm-up")
    assert batches.empty(modules.overlaid, VOCABULARY).readiness.kernels is None


def started(loader: Any, monkeypatch: pytest.MonkeyPatch, v2: bool = False) -> tuple[Any, Any]:
    """End a worker's start-up; its calls in order, and torch's next random numbers."""
    module = loader(WORKER)
    calls: list[Any] = []
    batch = batches.empty(modules.overlaid, VOCABULARY)

    def draw(name: str, *results: Any) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            calls.append((name, *arguments) if name == "compile" else name)
            torch.rand(7)
            return results

        return call

    batch.readiness.kernels = SimpleNamespace(compile=draw("compile"))
    runner = SimpleNamespace(
        input_batch=batch,
        is_pooling_model=False,
        lora_config=None,
        maybe_remove_all_loras=lambda _: None,
        _dummy_run=draw("_dummy_run", None, None),
        _dummy_sampler_run=draw("_dummy_sampler_run"),
    )
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(mode=None)),
        compilation_config=SimpleNamespace(compilation_time=0.0, encoder_compilation_time=0.0),
        model_config=SimpleNamespace(enforce_eager=True, seed=3),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        use_v2_model_runner=v2,
        model_runner=runner,
        execute_model=None,
        sample_tokens=None,
    )
    seed = module.set_random_seed

    def note_seed(number: int) -> None:
        calls.append("seed")
        seed(number)

    monkeypatch.setattr(module, "kernel_warmup", lambda _: None)
    monkeypatch.setattr(module, "warmup_kernels", lambda *_: None, raising=False)
    monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    monkeypatch.setattr(module, "set_random_seed", note_seed)
    module.Worker.compile_or_warm_up_model(worker)
    return [call if call != ("compile", runner) else "ours" for call in calls], torch.rand(5)


def test_the_worker_calls_it_once_before_it_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model Runner V2 has a warm-up of its own."""
    stock, expected = started(modules.pristine, monkeypatch)
    ours, numbers = started(modules.overlaid, monkeypatch)
    assert stock == ["_dummy_run", "_dummy_sampler_run", "seed"]
    assert ours == [*stock[:-1], "ours", "seed"]
    assert torch.equal(numbers, expected)
    assert started(modules.overlaid, monkeypatch, v2=True)[0] == ["seed"]


@pytest.mark.usefixtures("variants")
def test_no_slot_and_no_block_of_a_request_is_written() -> None:
    """A launch for no request writes padding; block 0 is the null block."""
    runner = Runner()
    tables = runner.input_batch.block_table
    runner.input_batch.block_table = mock.Mock(wraps=tables)
    runner._zero_block_ids = mock.Mock()
    compile_kernels(runner)
    mapped = runner.input_batch.block_table.compute_slot_mapping.call_args_list
    assert {call.args[0] for call in mapped} == {0}
    assert {block for call in runner._zero_block_ids.call_args_list for block in call.args[0]} == {
        0
    }


class Filters:
    """The kernels of top_k and top_p, which note what is asked of them.

    Args:
        calls: the notes.
        refused: methods that fail.
        arguments: of FilterKernels.
    """

    def __init__(self, calls: list[Any], refused: tuple[str, ...], *arguments: Any) -> None:
        self.calls = calls
        self.refused = refused
        calls.extend(arguments)

    def start_compilation(self) -> None:
        self.calls.append("start")

    def wait(self) -> None:
        self.calls.append("wait")
        assert "wait" not in self.refused

    def launch(self, logits: torch.Tensor) -> None:
        self.calls.append((logits.shape, logits.dtype))
        logits.fill_(-1.0)
        assert "launch" not in self.refused


@pytest.mark.parametrize("refused", [(), ("wait",), ("logits",), ("launch",)])
def test_ranks_launch_the_filters_when_the_first_has_written_them(
    refused: tuple[str, ...], variants: set[launches.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    runner = Runner()
    group = SimpleNamespace(barrier=lambda: calls.append("barrier"))
    monkeypatch.setattr(warm_up, "get_tp_group", lambda: group)
    if "logits" in refused:  # on this rank alone: the others must not wait for it
        runner.model.compute_logits = None
    kept: Any = warm_up.WarmUp()
    kept._filters = Filters(calls, refused)
    kept.compile(runner)
    launched = [((16, VOCABULARY), torch.float32)]
    assert calls == ["wait", "barrier", *(launched if "logits" not in refused else [])]
    assert variants


@pytest.mark.parametrize(
    ("change", "drafts", "sizes", "starts"),
    [
        ({}, 0, (9, 16), True),
        ({"is_first_rank": False}, 0, (9, 16), False),
        ({"is_last_rank": False}, 0, None, False),
        ({"max_num_reqs": 7}, 0, None, False),
        ({"max_num_reqs": 8}, 0, (8,), True),
        ({"max_num_reqs": 7}, 2, (9,), True),
        ({"is_pooling_model": True}, 0, None, False),
        ({"engine": False}, 0, None, False),
    ],
)
def test_filters_are_compiled_where_logits_are_filtered(
    change: dict[str, Any],
    drafts: int,
    sizes: tuple[int, ...] | None,
    starts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    module = SimpleNamespace(FilterKernels=lambda *arguments: Filters(calls, (), *arguments))
    monkeypatch.setitem(sys.modules, "vllm.v1.readiness.sample.compilation", module)
    monkeypatch.setattr(warm_up, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    rank = SimpleNamespace(**{"is_first_rank": True, "is_last_rank": True, **change})
    if change.get("engine", True):
        monkeypatch.setattr(warm_up, "model_parallel_is_initialized", lambda: True)
        monkeypatch.setattr(warm_up, "get_pp_group", lambda: rank)
        monkeypatch.setattr(warm_up, "get_tp_group", lambda: rank)
    fields = {"max_num_reqs": 40, "is_pooling_model": False, "vocab_size": VOCABULARY, **change}
    batch: Any = SimpleNamespace(device=torch.device("cuda"), **fields)
    warm_up._filter_kernels.cache_clear()
    for _ in range(2):  # vLLM makes another batch when it knows the sizes of blocks
        assert warm_up.WarmUp.make(batch, drafts) is not None
    warm_up._filter_kernels.cache_clear()
    made = [] if sizes is None else [sizes, VOCABULARY]
    assert calls == made + ["start"] * (2 * starts)
