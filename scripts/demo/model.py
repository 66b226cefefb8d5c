"""A tiny generated model: a configuration, and optionally a tokenizer.

vLLM generates the weights with ``load_format="dummy"``. :func:`shapes` gives names and shapes
to whoever needs other weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A Qwen2 of about 1 MB. The head size of 32 is the smallest that vLLM's CPU attention
#: takes.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Changes for an EAGLE head, a layer of the model's own sizes.
EAGLE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
}


def write(directory: Path, **changes: object) -> Path:
    """Write a configuration into ``directory``, which is created if it does not exist.

    Args:
        directory: the model to be passed to vLLM.
        changes: fields that differ from :data:`CONFIG`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def write_tokenizer(directory: Path, size: int, **settings: object) -> Path:
    """Write a tokenizer for transformers into ``directory``, which is created if missing.

    Each token is a word, "t17" for 17, and words are separated by spaces. No token is
    special, so that a text shows all its tokens.

    Args:
        directory: not the configuration's, because transformers treats every tokenizer
            beside a Qwen2 configuration as a Qwen2 tokenizer.
        size: of the vocabulary.
        settings: further fields of tokenizer_config.json, such as a chat template.
    """
    directory.mkdir(parents=True, exist_ok=True)
    words = {f"t{token}": token for token in range(size)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(fast | settings))
    return directory


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of a checkpoint for ``config``.

    ``lm_head.weight`` is included even if the configuration ties it.
    """
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    weights: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.q_proj.bias": (hidden,),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.k_proj.bias": (keys,),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.bias": (keys,),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        }
    return weights
