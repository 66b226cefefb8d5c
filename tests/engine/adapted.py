"""Serve requests with LoRA adapters that are reloaded and removed, from one prefix cache.

    python adapted.py MODEL_DIR OUT.json

OUT.json has by scenario the token ids that requests got, by name, as "blocks". "alone" holds the
replies of each adapter in an engine without a prefix cache.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import adapters
from support.checkpoint import generate
from support.engine_loop import build_engine
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

PROMPT = [*range(10, 70)]
LENGTH = 16
FOLDER = Path(tempfile.mkdtemp(prefix="adapters-"))
#: An adapter of each seed, as the replies are called in the report.
PATHS = {f"a{seed}": str(adapters.write(FOLDER / f"a{seed}", seed)) for seed in (1, 2, 3)}
ROOM = {"max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": adapters.RANK}

Asked = Mapping[str, tuple[LoRARequest | None, str | None]]


def engine(model: Path, **arguments: Any) -> Any:
    """Build an engine that serves adapters."""
    fixed = {"num_gpu_blocks_override": 200, "block_size": 16, **ROOM}
    return build_engine(model, enable_lora=True, **fixed, **arguments)


def serve(served: Any, asked: Asked) -> dict[str, Any]:
    """Serve requests, by name their adapter and salt; token ids by name."""
    for name, (adapter, salt) in asked.items():
        prompt: Any = {"prompt_token_ids": PROMPT}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        served.add_request(name, prompt, params, lora_request=adapter)
    replies: dict[str, Any] = {}
    while served.has_unfinished_requests():
        outputs = served.step()
        replies |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return replies


def adapter(path: str, number: int, name: str = "same", **fields: Any) -> LoRARequest:
    """Name an adapter."""
    return LoRARequest(name, number, PATHS.get(path, path), **fields)


def alone(model: Path) -> dict[str, Any]:
    """Serve each adapter and the base alone."""
    served = engine(model)
    replies = serve(served, {"base": (None, None)})
    for number, path in enumerate(PATHS, 1):
        replies |= serve(served, {path: (adapter(path, number, path), None)})
    return replies


def blocks(model: Path) -> dict[str, Any]:
    """Serve names and salts one after another from one prefix cache."""
    served = engine(model, enable_prefix_caching=True)

    def ask(name: str, lora: LoRARequest | None, salt: str | None = None) -> dict[str, Any]:
        return serve(served, {name: (lora, salt)})

    report: dict[str, Any] = {}
    ask("first", adapter("a1", 1))
    report["another id"] = ask("a2", adapter("a2", 2))
    ask("first", adapter("a1", 3, "tenant"))
    report["a salt"] = ask("base", None, "tenant")
    report["a salt for an adapter"] = ask("a1", adapter("a1", 3, "tenant"), "tenant")

    ask("first", adapter("a1", 4, "inplace"))
    served.add_lora(adapter("a3", 4, "inplace", load_inplace=True))
    report["in place"] = ask("a3", adapter("a3", 4, "inplace"))

    written = str(adapters.write(FOLDER / "overwritten", 1))
    ask("first", adapter(written, 5, "overwritten"))
    adapters.write(FOLDER / "overwritten", 2)
    served.add_lora(adapter(written, 5, "overwritten", load_inplace=True))
    report["overwritten"] = ask("a2", adapter(written, 5, "overwritten"))
    adapters.write(FOLDER / "overwritten", 3)
    served.remove_lora(5)
    report["removed"] = ask("a3", adapter(written, 5, "overwritten"))
    adapters.write(FOLDER / "overwritten", 2)
    lora = adapter(written, 5, "overwritten", load_inplace=True)
    report["in place by a request"] = ask("a2", lora)

    # Waiting requests were hashed before the adapter is reloaded.
    ask("first", adapter("a1", 6, "waiting"))
    lora = adapter("a2", 6, "waiting", load_inplace=True)
    served.add_request(
        "a2",
        {"prompt_token_ids": PROMPT},
        SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False),
        lora_request=adapter("a1", 6, "waiting"),
    )
    served.add_lora(lora)
    report["waiting"] = serve(served, {})
    return report


def main(model: Path, out: Path) -> None:
    """Serve both parts."""
    generate(model)
    out.write_text(json.dumps({"alone": alone(model), "blocks": blocks(model)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
