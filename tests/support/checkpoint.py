"""A small model whose weights are drawn so that its logits lie well apart.

The weights that vLLM draws itself nearly tie, and then the tokens depend on which
requests share a batch.
"""

from pathlib import Path

import torch
from demo.model import CONFIG, write
from safetensors.torch import save_file

VOCABULARY = 1009
SPREAD = 0.3


def generate(directory: Path) -> Path:
    """Write a Qwen2 with random weights, the same ones each time, unless it is there."""
    checkpoint = directory / "model.safetensors"
    if checkpoint.exists():
        return directory
    hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
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
    chance = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=chance) * SPREAD
        for name, shape in shapes.items()
    }
    write(directory, vocab_size=VOCABULARY, tie_word_embeddings=False, torch_dtype="float32")
    save_file(weights, checkpoint, metadata={"format": "pt"})
    return directory
