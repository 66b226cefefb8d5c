"""Launches of Triton's kernels without a GPU: the variants that Triton would compile for one.

Triton itself classifies the arguments. Nothing is compiled or run.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from support import modules

#: Kernel, and Triton's key of the variant.
Variant = tuple[str, str]


class Device:
    """A driver's part that Triton asks before it compiles, for an H100."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def recorded(*parts: str) -> Iterator[set[Variant]]:
    """Record the kernel variants that these modules launch; re-import the modules with Triton."""
    variants: set[Variant] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        variants.add((fn.name, key))
        return True  # compiled elsewhere, as far as Triton knows

    with pytest.MonkeyPatch.context() as patch, modules.imported_anew(*parts):
        patch.setitem(sys.modules, "vllm.triton_utils", modules.triton_facade())
        patch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        patch.setattr(driver, "_active", Device())
        for part in parts:
            importlib.import_module(part)
        yield variants
