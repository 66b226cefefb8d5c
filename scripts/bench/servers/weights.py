"""Weights under which no two tokens nearly tie.

A server's batches depend on when requests arrive, and so does the rounding of their logits. With
these weights requests return the same tokens in every batch, and penalties have a plain effect.
"""

from __future__ import annotations

import json
from pathlib import Path

from demo import model

#: Distance between the logits of a token's best continuations. Penalties of 0.5, 1 and 1.5 move
#: one between two others, never onto one; other batches round by a tenth of it.
STEP = 0.6
BEST, CHOICES = 8.0, 12
#: The length of the rings that the best continuations form; it divides the hidden size.
RING = 8
#: The range in which vLLM draws its dummy weights.
SPREAD = 1e-3


def write_weights(directory: Path) -> None:
    """Write weights for the configuration in ``directory``.

    The embedding holds one large element, the layers add next to nothing to it, and the head
    gives each such element a few continuations of its own, well apart from one another.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((directory / "config.json").read_text())
    chance = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in model.shapes(config).items():
        drawn = torch.empty(shape, dtype=getattr(torch, config["torch_dtype"]))
        weights[name] = drawn.uniform_(-SPREAD, SPREAD, generator=chance)
        if "norm" in name:
            drawn.fill_(1)
    vocabulary, hidden = weights["lm_head.weight"].shape
    embedding, head = weights["model.embed_tokens.weight"].zero_(), weights["lm_head.weight"]
    # The final norm leaves the element at the root of the hidden size.
    embedding[torch.arange(vocabulary), torch.arange(vocabulary) % hidden] = hidden**0.5
    logits = BEST - STEP * torch.arange(CHOICES)
    for element in range(hidden):
        # The best continuations form rings, so that a penalty soon meets a repeated token.
        after = element - element % RING + (element + 1) % RING
        turns = int(torch.randint(vocabulary // hidden, (), generator=chance))
        tokens = torch.randperm(vocabulary, generator=chance)[: 2 * CHOICES]
        best = torch.tensor([after + turns * hidden])
        tokens = torch.cat([best, tokens[tokens % hidden != after]])
        head[tokens[:CHOICES], element] = (logits / hidden**0.5).to(head.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
