"""A small text model whose positions have three dimensions (M-RoPE), as those of Qwen-VL.

Where a model reads images, a prompt's positions count time, height and width, and outputs begin
with a position of their own. Here every prompt's first tokens are taken for an image, so that no
images, processors and towers are needed.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "ReadinessMRopeForCausalLM"
#: Fields of the demo's model that differ; a head has 16 frequencies.
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    },
}
#: Columns of the image.
WIDTH = 4


def register() -> None:
    """Make the model known to vLLM in this process; also a general plugin."""
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import SupportsMRoPE
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    class ReadinessMRopeForCausalLM(Qwen2ForCausalLM, SupportsMRoPE):  # type: ignore[misc]
        def get_mrope_input_positions(
            self, input_tokens: list[int], mm_features: list[Any]
        ) -> tuple[torch.Tensor, int]:
            """Return positions, int64 [3, tokens], and by how much outputs are further."""
            del mm_features
            count = len(input_tokens)
            rows = count // 2 // WIDTH
            patches = torch.arange(rows * WIDTH)
            image = torch.stack([patches * 0, patches // WIDTH, patches % WIDTH])
            begin = max(rows, WIDTH) if rows else 0
            text = torch.arange(count - rows * WIDTH) + begin
            return torch.cat([image, text.expand(3, -1)], dim=1), int(text[-1]) + 1 - count

    ModelRegistry.register_model(ARCHITECTURE, ReadinessMRopeForCausalLM)
