"""The engines' arguments that the benchmarks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

#: Of a generated model, which has neither weights nor a tokenizer.
GENERATED = {"load_format": "dummy", "skip_tokenizer_init": True}


def arguments(
    model: str | Path, batch: int, length: int, graphs: Iterable[int], **others: Any
) -> EngineArgs:
    """Return the arguments of an engine whose steps are alike: no prefix cache, no compiler.

    Args:
        model: its directory.
        batch: requests at a time.
        length: max_model_len in tokens.
        graphs: tokens of the steps that are captured as CUDA graphs, of decoding alone.
        others: further arguments.
    """
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        seed=0,
        max_model_len=length,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(graphs),
        },
        **others,
    )
