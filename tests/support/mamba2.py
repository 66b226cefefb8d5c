"""The metadata of Mamba 2's layers for a step, by upstream's builder or ours."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from support.hybrid_step import RECURRENT, Row, config

BUILDER = "vllm/v1/attention/backends/mamba2_attn.py"
#: Of a drafted request.
DRAFTS = 3
DECODE, DRAFTED = Row(5, 9), Row(5, 9, 1 + DRAFTS, DRAFTS)
WHOLE, LATER = Row(9, 0, 9), Row(30, 16, 14)


def metadata(
    load: Any,
    rows: Sequence[Row],
    drafts: int = 0,
    rejected: int = 0,
    mode: str = "none",
    place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> Callable[[], Any]:
    """Return a call that builds the metadata of a step.

    Args:
        load: modules.pristine or modules.overlaid.
        rows: requests, decodes first, as the runner orders them.
        drafts: the most drafts of a request.
        rejected: drafts of each decode's last step that were rejected, as the host does not know.
        mode: mamba_cache_mode.
        place: makes a tensor of the device.
    """
    settings = config(drafts)
    settings.model_config.get_mamba_chunk_size = lambda: 8
    settings.model_config.max_model_len = 4 * RECURRENT.block_size
    settings.cache_config.mamba_cache_mode = mode
    if drafts:
        settings.speculative_config.parallel_drafting = False
    tokens = np.array([row.tokens for row in rows])
    computed = np.array([row.computed for row in rows])
    decoding = np.array([row.computed >= row.prompt for row in rows])
    starts = torch.from_numpy(np.append(0, tokens.cumsum()).astype(np.int32))
    bound = torch.from_numpy((computed + tokens).astype(np.int32))
    lengths = bound - torch.from_numpy((rejected * decoding * (computed > 0)).astype(np.int32))
    blocks = torch.arange(4 * len(rows), dtype=torch.int32).view(-1, 4)
    common = CommonAttentionMetadata(
        query_start_loc=place(starts),
        query_start_loc_cpu=starts,
        seq_lens=place(lengths),
        seq_lens_cpu_upper_bound=bound,
        num_reqs=len(rows),
        num_actual_tokens=int(tokens.sum()),
        max_query_len=int(tokens.max()),
        max_seq_len=int(bound.max()),
        block_table_tensor=place(blocks),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        is_prefilling=torch.from_numpy(~decoding),
    )
    device = common.seq_lens.device
    builder = load(BUILDER).Mamba2AttentionMetadataBuilder(RECURRENT, ["layer"], settings, device)
    accepted = place(torch.ones(len(rows), dtype=torch.int32)) if drafts else None
    return partial(builder.build, 0, common, num_accepted_tokens=accepted)
