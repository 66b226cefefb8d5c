"""Serve short prompts with a hybrid model, and write each request's output.

    python hybrid.py MODEL_DIR OUT.json graphs|eager|ahead DRAFTS [many] [qwen3-next]

The model is a small Bamba (attention and Mamba 2) whose weights are drawn here, so that logits
lie well apart, in float32; or a Qwen3-Next (attention and gated delta nets) without experts, whose
kernels take no float32. A prompt is as long as a decode: 1 + DRAFTS tokens. One arrives while
others decode, one when nobody is left. With ``many``, requests join and leave at many steps.
``ahead`` is without CUDA graphs, and schedules asynchronously where there are drafts.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from bench import models
from support.engine_loop import Arrival, build_engine, run_requests

VOCABULARY = 128
SEQUENCES = 8
TOKENS = 24
CONFIG: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # so that a page of attention has room for the state with drafts
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEXT: dict[str, Any] = {
    "architectures": [models.DENSE],
    "model_type": "qwen3_next",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def draw_weights(model: torch.nn.Module) -> None:
    """Draw a model's weights in place, the same ones each time.

    Embeddings are large: where the last token decides most, outputs become periodic, and drafts
    are accepted.
    """
    for name, weight in model.named_parameters():
        chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(weight.shape, generator=chance)
        if "norm" in name or name.endswith(".D"):
            values = torch.ones(weight.shape)
        elif name.endswith(".A"):
            values = -0.5 - values.abs()
        elif name.endswith(("A_log", "dt_bias")):
            values *= 0.5
        elif "lm_head" in name:
            values *= 2 * weight.shape[-1] ** -0.5
        elif weight.dim() > 1 and "embed" not in name:
            values *= weight.shape[-1] ** -0.5
        weight.data.copy_(values.to(weight.dtype))


def prompt(name: str, length: int) -> list[int]:
    """Draw a request's prompt."""
    chance = random.Random(name)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def requests(drafts: int, many: bool) -> list[Arrival]:
    """Return the requests; "short" are those as long as a decode."""
    params = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}
    if many:
        chance = random.Random(0)
        return [
            Arrival(
                str(number),
                prompt(str(number), chance.randint(2, 30)),
                {**params, "max_tokens": chance.randint(4, 80)},
                chance.randrange(120),
            )
            for number in range(48)
        ]
    short = 1 + drafts
    return [
        Arrival("one", prompt("one", 9), params),
        Arrival("two", prompt("two", 12), params),
        Arrival("short beside others", prompt("short", short), params, 8),
        Arrival("short alone", prompt("alone", short), params, 8 * TOKENS),
    ]


def main(directory: Path, out: Path, mode: str, drafts: int, *words: str) -> None:
    """Run the requests."""
    config, dtype = CONFIG, "float32"
    if "qwen3-next" in words:
        models.register()
        config, dtype = NEXT, "bfloat16"
    directory = out.with_suffix(".model")  # another run may use the same words
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    arguments: dict[str, Any] = {}
    if drafts:
        arguments["speculative_config"] = {
            "method": "ngram_gpu" if mode == "ahead" else "ngram",
            "num_speculative_tokens": drafts,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if mode == "graphs":
        arguments["enforce_eager"] = False
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [rows * (1 + drafts) for rows in (1, 2, 4, SEQUENCES)],
        }
    if "qwen3-next" in words:  # by default these kernels are FlashInfer's on Hopper
        arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
    engine = build_engine(
        directory,
        load_format="dummy",
        dtype=dtype,
        attention_backend="TRITON_ATTN",
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=512 << 20,  # no profiling, which other engines would disturb
        max_num_seqs=SEQUENCES,
        async_scheduling=not drafts or mode == "ahead",
        **arguments,
    )
    engine.apply_model(draw_weights)
    outputs, steps = run_requests(engine, requests(drafts, "many" in words))
    out.write_text(json.dumps({"outputs": outputs, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
