"""A small overlay with a feature and two fixes, the release that it is for, and later ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from overlay.source import Overlay
from review.wheels import Release
from series.upstream import Upstream

from support import series
from support.series import BASE as PLAIN
from support.series import OTHER, RUNNER, replaced

CONFIG, ENGINE = "vllm/config/vllm.py", "vllm/v1/engine.py"
#: Model Runner V1, which all patches change, and V2.
V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"
#: What chooses the model runner.
SELECTOR = '''\
"""Configures."""

NAMED = frozenset({"OneForCausalLM"})


class VllmConfig:
    @property
    def use_v2_model_runner(self) -> bool:
        architectures = getattr(self.model_config, "architectures", [])
        return any(each in NAMED for each in architectures)
'''
#: What calls a function that holds a seam, and what is called from there.
_MAKER = '''\
"""Runs an engine."""

from vllm.v1.worker.gpu_model_runner import Runner


class Engine:
    def __init__(self):
        self.runner = Runner()
'''
_STEPS = '''\
"""Steps."""


def steps(rows):
    return scaled(rows)


def scaled(rows):
    return [row * 2 for row in rows]
'''
BASE: Mapping[str, str] = {
    **PLAIN,
    V1: replaced(
        RUNNER,
        ('"""Runs."""\n', '"""Runs."""\n\nfrom vllm.v1.other import steps\n'),
        ("        chosen = max(logits)\n", "        chosen = max(steps(logits))\n"),
    ),
    OTHER: _STEPS,
    ENGINE: _MAKER,
    CONFIG: SELECTOR,
    V2: '"""Runs anew."""\n\n\nclass GPUModelRunner:\n    pass\n',
}
METADATA = (
    "Metadata-Version: 2.1\nName: vllm\nRequires-Python: >=3.10\nRequires-Dist: torch==2.11.0\n\n"
)

#: What each patch replaces: the imports, a feature's seam, and the seams of two fixes.
EDITS = (
    (
        "LIMIT = 8\n",
        "from vllm.v1.readiness import alpha, beta, gamma\n\nLIMIT = 8\n",
    ),
    ("        self.wait()\n", "        alpha.note(self)\n"),
    ("        return total\n", "        beta.done(self)\n        return total\n"),
    ("        self.rows = []\n", "        self.rows = gamma.rows()\n"),
)
#: The words of each patch.
SERVES = ("alpha, beta, gamma", "alpha", "beta", "gamma")
#: What upstream has of the fixes.
ERRATA = """\
[errata.beta]
upstream = ["1"]
mended = "0.24.0"

[errata.gamma]
upstream = ["2"]
partly = { "0.24.0" = "half of it" }
"""

_MODULE = '''"""{word}."""

from vllm.v1.readiness import registry
from vllm.v1.worker.gpu_model_runner import Runner

# mirrors: {mirrors}


def {verb}(runner: Runner | None = None) -> list[int]:
    """Do it."""
    return [{use}] if registry.{constant} else []
'''
_OURS = {
    "registry.py": '''"""Words."""

from types import SimpleNamespace

ALPHA, BETA, GAMMA = "alpha", "beta", "gamma"
FEATURES = frozenset({ALPHA})
FIXES = frozenset({BETA, GAMMA})
WORDS = {name: SimpleNamespace(needs=(), homes=(name,)) for name in (ALPHA, BETA, GAMMA)}
ON_V2 = frozenset({GAMMA})
''',
    "alpha.py": _MODULE.format(
        word="Alpha", verb="note", constant="ALPHA", use="runner.prepare([])",
        mirrors="vllm.v1.worker.gpu_model_runner:Runner.wait",
    ),
    "beta.py": _MODULE.format(
        word="Beta", verb="done", constant="BETA", use="0", mirrors="nothing"
    ),
    "gamma.py": _MODULE.format(
        word="Gamma", verb="rows", constant="GAMMA", use="0", mirrors="nothing"
    ),
}  # fmt: skip


def upstream(texts: Mapping[str, str] = BASE) -> Upstream:
    """A release of these files."""
    return replace(series.upstream(texts), metadata=METADATA)


def checkout(root: Path) -> Overlay:
    """Write the overlay into ``root`` and read it."""
    folder = root / "vendor_overlay" / "vllm" / "v1" / "readiness"
    folder.mkdir(parents=True)
    for name, text in _OURS.items():
        (folder / name).write_text(text)
    overlay = series.checkout(root, EDITS, BASE, V1, SERVES)
    series.state_facts(root, ERRATA)
    return overlay


def release(version: str, *edits: tuple[str, str, str]) -> Release:
    """A later release: each edit is a file, the old text and the new one."""
    texts = dict(BASE)
    for path, old, new in edits:
        texts[path] = replaced(texts[path], (old, new)) if old else new
    wheel = f"vllm-{version}-py3-none-any.whl"
    return Release(version, wheel, "a" * 64, "a test's", upstream(texts))


#: The edits that bring one model more to Model Runner V2.
TAKEN_OVER = ((CONFIG, '{"OneForCausalLM"}', '{"OneForCausalLM", "TwoForCausalLM"}'),)
#: A conflict in the feature's seam.
CONFLICT = ((V1, "        self.wait()\n", "        self.wait(1)\n"),)
#: What the feature calls and what it mirrors, a callee, another maker, and another change.
CHANGED = (
    (V1, "return len(self.rows)", "return len(rows)"),
    (V1, "        return None\n", "        return 0\n"),
    (OTHER, "row * 2", "row * 3"),
    (ENGINE, "self.runner = Runner()", "self.runner = Engine()"),
    (V1, '"""Runs."""\n', '"""Runs."""\n\nMORE = 1\n'),
)
