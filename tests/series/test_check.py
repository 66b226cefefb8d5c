"""The faults of a checkout that `make test` complains of."""

from pathlib import Path

import pytest
from overlay.errors import OverlayError
from overlay.source import Overlay
from series import check
from support import mini
from support.sites import OVERLAY, REPO, UPSTREAM

PATCH = "patches/0001-all.patch"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a small overlay."""
    return mini.overlay(tmp_path / "overlay").root


def complaints(root: Path) -> list[str]:
    return list(check.complaints(root, mini.PRISTINE.__getitem__))


def test_this_checkout_is_in_order() -> None:
    assert list(check.complaints(REPO, lambda path: (UPSTREAM / path).read_bytes())) == []


def test_every_changed_file_of_this_checkout_says_that_it_was_changed() -> None:
    for path in OVERLAY.targets:
        data = OVERLAY.overlaid_bytes(path, (UPSTREAM / path).read_bytes())
        head = b"".join(data.splitlines(keepends=True)[:5])
        assert b"Changed by vllm-readiness-overlay" in head
        assert b"provenance/patches" in head


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        (PATCH, b"-B = 2\n", b"-B = 3\n", "0001-all.patch does not apply"),
        (PATCH, b"Drop-When:", b"Never-Mind:", f"{PATCH}: the header lacks Drop-When"),
        ("patches/0009-forgotten.patch", b"", b"x", "is not listed in patches/series"),
        ("patches/README.md", b"", b"x", "patches/README.md is stale"),
        ("vendor_overlay/vllm/v1/readiness/a.py", b"1", b"2", "VERSION_PIN is stale"),
        ("VERSION_PIN", b"overlay = 0.0.1", b"overlay = 0.0.2", "VERSION_PIN is stale"),
    ],
)
def test_a_fault_is_complained_of(
    root: Path, file: str, old: bytes, new: bytes, complaint: str
) -> None:
    assert complaints(root) == []
    data = (root / file).read_bytes() if (root / file).exists() else b""
    assert old in data
    (root / file).write_bytes(data.replace(old, new, 1))
    assert complaint in complaints(root)[0]


def test_patches_and_pin_must_name_the_same_files(root: Path) -> None:
    pin = root / "VERSION_PIN"
    kept = [line for line in pin.read_text().splitlines() if not line.endswith("vllm/one.py")]
    pin.write_text("\n".join(kept) + "\n")
    with pytest.raises(OverlayError, match=r"disagree on vllm/one\.py"):
        Overlay.load(root)
