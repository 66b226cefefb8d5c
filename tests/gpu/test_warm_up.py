"""Nothing is compiled once the engine has started, with empty caches on a GPU."""

from pathlib import Path
from typing import Any

import pytest
from gpu.kinds import ENVIRONMENT
from support.engine import Engine
from support.sites import REPO

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "warm_up.py"


def serve(engine: Engine, name: str, switch: str, caches: Path) -> Any:
    """Run the program with caches of its own."""
    environment = {
        **ENVIRONMENT,
        "VLLM_READINESS": switch,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
    }
    return engine.start(PROGRAM, [name], environment=environment).finish()


@pytest.mark.parametrize("name", ["async", "sync", "ngram", "ngram_gpu"])
def test_nothing_is_compiled_after_the_start(
    engines: dict[str, Engine], name: str, tmp_path: Path
) -> None:
    on = serve(engines["overlaid"], name, "on", tmp_path / "on")
    off = serve(engines["overlaid"], name, "-warm-up,-logprob-ranks", tmp_path / "off")
    print(f"{name}: start {off['seconds']:.1f} s, with warm-up {on['seconds']:.1f} s")
    assert on["late"] == {}
    late = "\n".join(each for names in off["late"].values() for each in names)
    for kernel in ("_topk_topp_kernel", "torch.compile", "apply_token_bitmask_inplace_kernel"):
        assert kernel in late
