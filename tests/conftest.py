"""Makes ``vllm.v1.readiness`` importable from this checkout, without an installation."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm.v1

vllm.v1.__path__.append(str(Path(__file__).resolve().parents[1] / "vendor_overlay" / "vllm" / "v1"))

# How long an example takes says more about a busy machine than about the code.
settings.register_profile(
    "busy", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")
