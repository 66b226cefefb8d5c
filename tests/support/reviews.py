"""Reviews of small made releases, and the program on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from overlay import cli
from review import __main__ as program
from review import review, wheels
from review.verdict import Review
from review.wheels import Release
from series import upstream
from series.upstream import Upstream

from support import series
from support.series import BASE, EDITS, PATH, RUNNER

VERSION = "0.23.0"


def release(
    files: Mapping[str, str] | None = None, version: str = VERSION, text: str = RUNNER
) -> Release:
    """A release of these files, or of those of :mod:`support.series` with one of another text."""
    files_of = series.upstream(files or {**BASE, PATH: text})
    wheel, digest = f"vllm-{version}-py3-none-any.whl", "a" * 64
    return Release(version, wheel, digest, "a test's", files_of, {wheel: digest})


def reviewed(
    root: Path,
    of: Release,
    base: Upstream | None = None,
    edits: Sequence[tuple[str, str]] = EDITS,
    **options: Any,
) -> Review:
    """Review a release with a checkout of that series in ``root``, and write it to "out" there."""
    overlay = series.checkout(root / "checkout", tuple(edits))
    series.state_facts(overlay.root)
    return review.of_release(overlay, base or series.upstream(BASE), of, root / "out", **options)


def prepare(patch: pytest.MonkeyPatch, root: Path, of: Release) -> Path:
    """Make a checkout in ``root``, which the program reviews this release with; return it."""
    checkout = series.checkout(root / "checkout").root
    series.state_facts(checkout)
    patch.setattr(program, "ROOT", checkout)
    patch.setattr(cli, "installation", lambda _: None)
    patch.setattr(upstream, "from_installation", lambda *_: series.upstream(BASE))
    patch.setattr(wheels, "obtain", lambda *_: of)
    return checkout
