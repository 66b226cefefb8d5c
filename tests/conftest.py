"""Makes ``vllm.v1.readiness`` importable from this checkout, without an installation."""

import os
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm.v1

vllm.v1.__path__.append(str(Path(__file__).resolve().parents[1] / "vendor_overlay" / "vllm" / "v1"))
