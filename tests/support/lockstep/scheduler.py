"""Upstream's real scheduler, configured for a lockstep run."""

import copy
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from demo.model import write
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

VOCABULARY = 37
#: Tokens in a block of the KV cache.
BLOCK = 4


def reasoning_config(markers: tuple[list[int], list[int]] | None) -> Any:
    """Return a reasoning config with these start and end markers; None without markers."""
    if markers is None:
        return None
    start, end = markers
    return SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)


def speculative_config(drafts: int, trimmed: bool) -> Any:
    """Return the config of a drafter that may trim its drafts; None for no drafts."""
    if not drafts:
        return None
    method = "ngram_gpu" if trimmed else "ngram"
    return SpeculativeConfig(method=method, num_speculative_tokens=drafts, prompt_lookup_max=2)


@cache
def _model() -> ModelConfig:
    path = write(Path(tempfile.mkdtemp(prefix="model-")), vocab_size=VOCABULARY)
    return ModelConfig(model=str(path), skip_tokenizer_init=True, seed=0)


def make_scheduler(
    asynchronous: bool,
    speculative: Any,
    num_blocks: int,
    max_num_seqs: int,
    max_tokens_a_step: int,
    max_model_len: int,
    kind: type[Scheduler] | None = None,
) -> Any:
    """Make a scheduler with a KV cache of ``num_blocks`` blocks.

    Args:
        asynchronous: schedule ahead of the outputs.
        speculative: the config of a drafter; None for no drafts.
        num_blocks: blocks of the KV cache.
        max_num_seqs: most requests that run at a time.
        max_tokens_a_step: most tokens scheduled for a step.
        max_model_len: longest sequence, in tokens.
        kind: its class; None for upstream's.
    """
    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=copy.copy(_model()),
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens_a_step,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        speculative_config=speculative,
    )
    config.model_config.max_model_len = max_model_len
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kind = kind or (AsyncScheduler if asynchronous else Scheduler)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        block_size=BLOCK,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )
