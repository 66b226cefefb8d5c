"""The buffers that a runner prepares a step's inputs in, and their comparison.

Those of the host and of the device are different memory, as on a GPU.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils import cpu_triton_utils as cpu_kernels
from vllm.v1.readiness.outputs.history import PLACEHOLDER
from vllm.v1.utils import CpuGpuBuffer

from support import modules

if TYPE_CHECKING:
    from support.lockstep.runner import RunnerUnderTest


def buffers(rows: int, tokens: int) -> dict[str, Any]:
    """Return a runner's attributes for its inputs, as its constructor makes them."""
    for load in (modules.pristine, modules.overlaid):
        module = load(modules.BLOCK_TABLE)
        module._compute_slot_mapping_kernel = cpu_kernels.compute_slot_mapping_kernel
    most = max(rows + 1, tokens)

    def buffer(*size: int, dtype: torch.dtype = torch.int32) -> CpuGpuBuffer:
        return CpuGpuBuffer(*size, dtype=dtype, device=torch.device("cpu"), pin_memory=False)

    def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    return {
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)]),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "enable_prompt_embeds": False,
        "lora_config": None,
        "pin_memory": False,
        "num_accepted_tokens_event": None,
        "mamba_prev_last_scheduled_idx": None,
        "valid_sampled_token_count_gpu": None,
        "arange_np": np.arange(most, dtype=np.int64),
        "query_pos": buffer(most, dtype=torch.int64),
        "input_ids": buffer(tokens),
        "query_start_loc": buffer(rows + 1),
        "optimistic_seq_lens_cpu": zeros(rows),
        "prev_positions": buffer(rows, dtype=torch.int64),
        "prev_num_draft_tokens": buffer(rows),
        "discard_request_mask": buffer(rows, dtype=torch.bool),
        "num_accepted_tokens": buffer(rows),
        "num_computed_tokens": zeros(rows),
        "req_indices": buffer(tokens, dtype=torch.int64),
        "num_scheduled_tokens": buffer(rows),
        "positions": zeros(tokens, torch.int64),
        "seq_lens": zeros(rows),
    }


def same_inputs(one: "RunnerUnderTest", other: "RunnerUnderTest") -> None:
    """Require the same counts of two runners, and without drafts the same inputs on the device.

    Args:
        one: upstream's, whose host may have a placeholder for a token.
        other: ours.
    """
    count = one.batch.num_reqs
    mine, theirs = (each.batch.num_computed_tokens_cpu[:count] for each in (one, other))
    assert (mine == theirs).all()
    mine, theirs = (each.runner.num_tokens_no_spec_gpu for each in (one, other))
    assert torch.equal(mine, theirs)
    if one.logits_indices is None or other.logits_indices is None:
        assert one.logits_indices is other.logits_indices
        return
    tokens = int(one.runner.query_start_loc.np[count])
    assert torch.equal(one.logits_indices, other.logits_indices)
    for name, size in {
        "input_ids": tokens,
        "positions": tokens,
        "query_start_loc": None,
        "seq_lens": None,
        "optimistic_seq_lens_cpu": None,
        "num_computed_tokens": count,
        "discard_request_mask": count,
        "num_accepted_tokens": None,
    }.items():
        mine, theirs = (_on_device(getattr(each.runner, name)) for each in (one, other))
        if name == "input_ids":
            # Stock computes placeholders again where a block has failed to load.
            theirs = torch.where(mine == PLACEHOLDER, mine, theirs)
        assert torch.equal(mine[:size], theirs[:size]), name
    mine, theirs = (each.batch.block_table[0] for each in (one, other))
    # Behind the tokens, upstream's kernel for the CPU leaves slots of earlier steps.
    assert torch.equal(mine.slot_mapping.gpu[:tokens], theirs.slot_mapping.gpu[:tokens])
    for row, blocks in enumerate(mine.num_blocks_per_row[:count]):
        # Behind a row's end stock has blocks of others; see readiness.row_state.
        rows = (table.block_table.gpu[row, :blocks] for table in (mine, theirs))
        assert torch.equal(*rows), row
    for mine, theirs in zip(
        one.runner.requests.values(), other.runner.requests.values(), strict=True
    ):
        assert mine.req_id == theirs.req_id
        assert mine.block_ids == theirs.block_ids
        assert mine.num_computed_tokens == theirs.num_computed_tokens


def _on_device(buffer: CpuGpuBuffer | torch.Tensor) -> torch.Tensor:
    return buffer.gpu if isinstance(buffer, CpuGpuBuffer) else buffer
