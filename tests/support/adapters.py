"""LoRA adapters with random weights for :func:`support.checkpoint.generate`'s model."""

import json
from pathlib import Path

import torch
from demo.model import CONFIG
from safetensors.torch import save_file

RANK = 8
#: Standard deviation of the weights: a reply shows which adapter made it.
SPREAD = 0.6


def write(directory: Path, seed: int) -> Path:
    """Write an adapter of the attention's projections; it replaces one that is there.

    Args:
        directory: of the adapter.
        seed: of its weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    narrow = hidden // heads * CONFIG["num_key_value_heads"]
    widths = {"q_proj": hidden, "k_proj": narrow, "v_proj": narrow}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "any",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "target_modules": [*widths],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, hidden, generator=chance)
            up = torch.randn(width, RANK, generator=chance)
            weights |= {f"{at}.lora_A.weight": down * SPREAD, f"{at}.lora_B.weight": up * SPREAD}
    save_file(weights, directory / "adapter_model.safetensors")
    return directory
