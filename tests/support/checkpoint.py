"""A small model whose random weights give logits that lie well apart.

With the weights that vLLM draws itself, logits nearly tie, and tokens depend on which
requests share a batch.
"""

from pathlib import Path
from typing import Any

import torch
from demo.model import CONFIG, shapes, write
from safetensors.torch import save_file

VOCABULARY = 1009
SPREAD = 0.3


def generate(directory: Path, **fields: Any) -> Path:
    """Write a Qwen2 with random weights, the same ones each time, unless it is there.

    Args:
        directory: of the checkpoint.
        fields: further ones of its configuration, which change no weight's shape.
    """
    checkpoint = directory / "model.safetensors"
    if checkpoint.exists():
        return directory
    changes = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    chance = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=chance) * SPREAD
        for name, shape in shapes(CONFIG | changes).items()
    }
    write(directory, **changes, **fields)
    save_file(weights, checkpoint, metadata={"format": "pt"})
    return directory
