"""Configurations of the generated models: fields of config.json that differ from the demo's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN2: Mapping[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6}
HALF_B: Mapping[str, Any] = {
    **_QWEN2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
SEVEN_B: Mapping[str, Any] = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
#: The dense Qwen3 that Model Runner V2 serves by default.
QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
#: A Bamba: attention in every sixth layer, Mamba 2 in the others.
HYBRID: Mapping[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "attn_layer_indices": [5, 11, 17, 23],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "vocab_size": 128256,
}
#: The class of :mod:`bench.qwen3_next`.
DENSE = "DenseQwen3NextForCausalLM"
#: A Qwen3-Next of 2B without experts, of layers as those of Qwen3.5.
NEXT: Mapping[str, Any] = {
    "architectures": [DENSE],
    "model_type": "qwen3_next",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "mlp_only_layers": [],
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
#: For a CPU: a step takes tens of milliseconds, and sampling is a fair part of it.
SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def memory(share: float) -> dict[str, Any]:
    """Return an engine's arguments for a share of the GPU's memory; empty on a CPU.

    A quarter of the share is the KV cache, whose size is then not found by a measurement of free
    memory, so that several engines can start on a GPU at the same time.

    Args:
        share: of the GPU's memory, which may be 0.4 for two engines.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {}
    cache = int(current_platform.get_device_total_memory() * share / 4)
    return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": cache}


def register() -> None:
    """Make :data:`DENSE` known to vLLM, as a plugin that each of its processes loads.

    vLLM imports the class only where it needs it: the import initializes CUDA.
    """
    from vllm import ModelRegistry

    ModelRegistry.register_model(DENSE, f"bench.qwen3_next:{DENSE}")
