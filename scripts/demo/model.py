"""A model small enough to make on the spot: a configuration, and no weights.

vLLM draws the weights itself with ``load_format="dummy"``.
"""

import json
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


def write(directory: Path, **changes: object) -> Path:
    """Write a configuration into ``directory``, which is made if need be.

    Args:
        directory: becomes the model that vLLM is told to load.
        changes: fields that differ from :data:`CONFIG`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory
