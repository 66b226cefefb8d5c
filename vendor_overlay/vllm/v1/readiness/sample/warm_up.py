"""Feature ``warm-up``: kernels that requests can reach are compiled before the engine is ready.

Triton compiles a kernel at its first launch, and again for arguments of another class. Integers are
classified as 1, multiples of 16, and all others; tensors by dtype and alignment, and None is a
class of its own. The dummy runs at vLLM's start-up launch few of these variants. The first request
that needs another variant stalls the whole engine: for seconds if it has ``top_k`` or ``top_p``,
for about a second if it asks for logprobs, because a compiled function computes their ranks.

Here vLLM's own functions launch each variant once at the end of start-up, with at most 16 rows. The
batch is empty then, and the results are dropped. Upstream seeds the global random number generators
afterwards, so requests draw the same numbers as without the feature. Kernels of models, attention
backends, LoRA and drafters are left to upstream's dummy runs.

The kernel of top_k and top_p compiles longer than all others together, and begins to when the
runner is made: :mod:`~vllm.v1.readiness.sample.compilation`.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.block_table:_compute_slot_mapping_kernel
# mirrors: vllm.v1.worker.utils:_zero_kv_blocks_kernel
# mirrors: vllm.v1.worker.mamba_utils:batch_memcpy_kernel
# mirrors: vllm.v1.spec_decode.utils:update_num_computed_tokens_for_batch_change
# mirrors: vllm.v1.sample.sampler:Sampler.gather_logprobs
# mirrors: vllm.v1.sample.ops.logprobs:batched_count_greater_than
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p
# mirrors: vllm.v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton
# mirrors: vllm.v1.sample.rejection_sampler:rejection_sample
# mirrors: vllm.v1.structured_output.utils:apply_grammar_bitmask

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_pp_group, get_tp_group, model_parallel_is_initialized
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.spec_decode.utils import update_num_computed_tokens_for_batch_change

if TYPE_CHECKING:
    from vllm.v1.readiness.sample.compilation import FilterKernels
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

#: Divisor by which Triton classifies integers, and maximum number of rows per launch.
_DIVISOR = 16
#: Represents the integers that are neither 1 nor a multiple of 16. At least 8, because top_k and
#: top_p of smaller batches are applied without Triton.
_OTHER = 9
#: Rows from which Triton applies top_k and top_p.
_FILTERED = 8


def counts(most: int) -> list[int]:
    """Return one integer per class that Triton distinguishes among 1 to ``most``."""
    return sorted({1, min(_OTHER, most)} | ({_DIVISOR} if most >= _DIVISOR else set()))


class WarmUp:
    """Warm-up of the kernels of one runner."""

    _filters: "FilterKernels | None" = None

    @classmethod
    def make(cls, batch: "InputBatch", num_spec_tokens: int) -> "WarmUp | None":
        """Create the feature, and begin to compile; None without CUDA."""
        if not (current_platform.is_cuda() and batch.device.type == "cuda"):
            return None
        feature = cls()
        rows = min(batch.max_num_reqs * max(1, num_spec_tokens), _DIVISOR)
        filters = rows >= _FILTERED and not batch.is_pooling_model
        # Outside an engine there are no groups.
        if filters and model_parallel_is_initialized() and get_pp_group().is_last_rank:
            sizes = tuple(size for size in counts(rows) if size >= _FILTERED)
            feature._filters = _filter_kernels(sizes, batch.vocab_size)
            if get_tp_group().is_first_rank:
                _try(feature._filters.start_compilation)
        return feature

    def compile(self, runner: "GPUModelRunner") -> None:
        """Launch each variant of the kernels; log and skip the parts that fail."""
        begun = time.perf_counter()
        with torch.inference_mode():  # like a step: torch.compile recompiles in another mode
            self._compile(runner)
        logger.info(
            "Readiness overlay: compiled the kernels that requests can reach in %.1f s.",
            time.perf_counter() - begun,
        )

    def _compile(self, runner: "GPUModelRunner") -> None:
        for part in (map_slots, zero_blocks, correct_counts, copy_states):
            _try(part, runner)
        if self._filters is not None:
            _try(self._filters.wait)
            get_tp_group().barrier()  # the other ranks read what the first has written
        multimodal = runner.model_config.multimodal_config
        encodes = multimodal is not None and multimodal.mm_encoder_only
        if get_pp_group().is_last_rank and not (runner.is_pooling_model or encodes):
            _try(self.read_logits, runner)

    def read_logits(self, runner: "GPUModelRunner") -> None:
        """Compile the kernels that read logits, for the dtype and strides of the model's logits."""
        config = runner.model_config
        size = (_DIVISOR, config.get_hidden_size())
        logits = runner.model.compute_logits(
            torch.zeros(size, dtype=config.dtype, device=runner.device)
        )
        if logits is None:  # on ranks that do not sample
            return
        if self._filters is not None:
            _try(self._filters.launch, logits.to(torch.float32, copy=True))
        for part in (sample, verify_drafts, mask):
            _try(part, runner, logits)


@cache
def _filter_kernels(batch_sizes: tuple[int, ...], vocab_size: int) -> "FilterKernels":
    """Return the kernels of a process, whose runner may make several batches."""
    from vllm.v1.readiness.sample.compilation import FilterKernels

    return FilterKernels(batch_sizes, vocab_size)


def _try(part: Callable[..., None], *arguments: object) -> None:
    """Run a part of the warm-up; after a failure, its kernels are compiled on demand."""
    try:
        part(*arguments)
    except Exception as error:  # a runner or sampler of another class may not support the call
        logger.warning_once(
            "Readiness overlay: %s failed in the warm-up (%s: %s). Its kernels may be compiled "
            "while requests are served.",
            *(part.__name__, type(error).__name__, error),
        )


def map_slots(runner: "GPUModelRunner") -> None:
    """Compile the slot mapping of each KV cache group, for each class of token counts."""
    for tokens in counts(runner.max_num_tokens):
        # Without requests, the kernel writes only padding.
        runner.input_batch.block_table.compute_slot_mapping(
            0, runner.query_start_loc.gpu[:1], runner.positions[:tokens]
        )


def zero_blocks(runner: "GPUModelRunner") -> None:
    """Compile the zeroing of new KV cache blocks, by zeroing the null block."""
    for blocks in counts(_DIVISOR):
        runner._zero_block_ids([0] * blocks)


def correct_counts(runner: "GPUModelRunner") -> None:
    """Compile the correction of num_computed_tokens after rejected drafts (async scheduling).

    torch.compile specializes sizes of 1. It gives equal sizes the same symbol, so different sizes
    are used here where they may differ in a step.
    """
    if not runner.use_async_spec_decode:
        return
    most = runner.max_num_reqs
    for rows, previous in product(sorted({1, min(2, most), most}), sorted({1, min(3, most)})):
        # Without drafts, each count is replaced by itself.
        update_num_computed_tokens_for_batch_change(
            runner.num_computed_tokens,
            runner.num_accepted_tokens.gpu[:rows],
            runner.prev_positions.gpu[:rows],
            torch.zeros(previous, dtype=torch.int32, device=runner.device),
            runner.prev_num_draft_tokens.gpu,
            runner.num_computed_tokens[:rows].clone(),
        )


def copy_states(runner: "GPUModelRunner") -> None:
    """Compile the copy of Mamba states in the align mode, by a copy of no bytes."""
    if runner.cache_config.mamba_cache_mode == "align":
        from vllm.v1.worker.mamba_utils import batch_memcpy

        buffers = runner._get_mamba_bufs().preprocess
        sizes = torch.zeros_like(buffers.sizes.gpu[:1])
        batch_memcpy(buffers.src_ptrs.gpu[:1], buffers.dst_ptrs.gpu[:1], sizes)


def _metadata(rows: int, device: torch.device, top_k: bool, top_p: bool) -> SamplingMetadata:
    """Return metadata of ``rows`` non-greedy requests with one logprob each."""
    ones = torch.ones(rows, device=device)
    filters = {
        "top_k": ones.to(torch.int32) if top_k else None,
        "top_p": ones if top_p else None,
    }
    penalties = ("frequency_penalties", "presence_penalties", "repetition_penalties")
    return SamplingMetadata(
        **filters,
        **dict.fromkeys(penalties, ones),  # not read
        no_penalties=True,
        temperature=ones,
        all_random=False,
        all_greedy=False,
        max_num_logprobs=1,
        generators={},
        bad_words_token_ids={},
        allowed_token_ids_mask=None,
        prompt_token_ids=None,
        output_token_ids=[[] for _ in range(rows)],
        logitsprocs=LogitsProcessors(),
    )


def _greedy(metadata: SamplingMetadata) -> SamplingMetadata:
    return replace(metadata, temperature=None, all_greedy=True)


def sample(runner: "GPUModelRunner", logits: torch.Tensor) -> None:
    """Compile the kernels of top_k, top_p and logprobs, with and without a seeded request."""
    seeded = {0: torch.Generator(runner.device).manual_seed(0)}
    for rows in counts(min(runner.max_num_reqs, len(logits))):
        for top_k, top_p in product((False, True), repeat=2):
            metadata = _metadata(rows, runner.device, top_k, top_p)
            # FlashInfer serves only batches without generators.
            for each in (metadata, replace(metadata, generators=seeded)):
                runner.sampler(logits=logits[:rows], sampling_metadata=each)
        runner.sampler(logits=logits[:rows], sampling_metadata=_greedy(metadata))


def verify_drafts(runner: "GPUModelRunner", logits: torch.Tensor) -> None:
    """Compile the kernels that verify drafts, with top_k, top_p and logprobs."""
    speculative = runner.speculative_config
    if speculative is None:
        return
    most = runner.num_spec_tokens
    given: list[torch.Tensor | None] = [None]
    for positions in counts(min(runner.max_num_reqs * most, len(logits))):
        lengths = [most] * (positions // most) + [positions % most] * (positions % most > 0)
        drafts = SpecDecodeMetadata.make_dummy([[0] * length for length in lengths], runner.device)
        if speculative.draft_sample_method == "probabilistic":
            given = [None, torch.ones(positions, logits.shape[-1], device=runner.device)]
        for probabilities, top_k, top_p in product(given, (False, True), (False, True)):
            metadata = _metadata(len(lengths), runner.device, top_k, top_p)
            for each in (metadata, _greedy(metadata)):
                runner.rejection_sampler(drafts, probabilities, logits, each)


def mask(runner: "GPUModelRunner", logits: torch.Tensor) -> None:
    """Compile the kernel that applies grammar bitmasks, with and without row indices."""
    # Imported from upstream's module, in case that module's library has been replaced.
    from vllm.v1.structured_output.utils import xgr

    words = -(-runner.input_batch.vocab_size // 32)
    masks = torch.full((len(logits), words), -1, dtype=torch.int32, device=runner.device)
    indices = torch.arange(len(logits), dtype=torch.int32, device=runner.device)
    for rows in counts(min(runner.max_num_reqs * (1 + runner.num_spec_tokens), len(logits))):
        for rows_masked in (None, indices[:rows]):
            xgr.apply_token_bitmask_inplace(logits[:rows], masks[:rows], indices=rows_masked)
