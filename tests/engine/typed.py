"""Send an engine requests whose values are of other types than declared.

    python typed.py MODEL_DIR OUT.json

Writes what became of each request, and of a plain one after it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

PROMPT = [3, 4, 5, 6]
#: By name; the first is the plain one.
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 5},
    "numpy's seed": {"seed": np.random.default_rng(0).integers(5, 6)},
    "numpy's ids": {"seed": 5, "allowed_token_ids": list(np.arange(900))},
    "plain ids": {"seed": 5, "allowed_token_ids": list(range(900))},
    "a float": {"seed": 5, "max_tokens": 4.0},
    "a bool as a seed": {"seed": True},
    "logprobs as a float": {"logprobs": 2.0},
}


def main(model: Path, out: Path) -> None:
    """Serve each request alone."""
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
    )

    def serve(**params: Any) -> Any:
        fields = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(**{**fields, **params})
        prompt: Any = {"prompt_token_ids": PROMPT}
        try:
            outputs = llm.generate(prompt, sampling, use_tqdm=False)
        except (ValueError, TypeError) as error:
            return str(error)
        return list(outputs[0].outputs[0].token_ids)

    became = {
        name: [serve(**params), serve(**REQUESTS["plain"])] for name, params in REQUESTS.items()
    }
    out.write_text(json.dumps(became))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
