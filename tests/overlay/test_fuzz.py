"""Whatever lies in an installation or in a patch: only the tool's own errors leave a parser."""

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay import pin as pins
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.merge import part
from overlay.patches import Series, header_fields, parse
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from series.check import load_unproven
from support import mini
from support.sites import run

pytestmark = pytest.mark.slow

PATCH = (
    mini.HEADER.encode()
    + b"\n"
    + b"".join(
        mini.unified(path, data, mini.OVERLAID[path]) for path, data in mini.PRISTINE.items()
    )
)
DIGITS = b"9" * 4301
#: What damage puts in place of some bytes.
PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [
            *(DIGITS, b"-" + DIGITS, b"0", b"9999999", b"9" * 11, b"\0", b"\xff", b"\n", b"\r"),
            b"[" * 5000,
            *(b"@@ -1 +1 @@\n", b"--- a/vllm/one.py\n+++ b/vllm/one.py\n", b"\\ No newline\n"),
        ]
    ),
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Some bytes, with up to three stretches of them replaced, among them whole numbers."""
    for _ in range(draw(st.integers(1, 3))):
        numbers = [match.span() for match in re.finditer(rb"\d+", whole)]
        start = draw(st.integers(0, len(whole)))
        stop = draw(st.integers(start, min(start + 40, len(whole))))
        if draw(st.booleans()) and numbers:
            start, stop = draw(st.sampled_from(numbers))
        whole = whole[:start] + draw(PIECES) + whole[stop:]
    return whole


@settings(max_examples=300, deadline=None)
@given(st.one_of(damaged(PATCH), st.binary(max_size=60)))
def test_patches(data: bytes) -> None:
    with contextlib.suppress(OverlayError):
        patch = parse("p.patch", data)
        header_fields(patch.header)
        for path, text in mini.PRISTINE.items():
            part(Series([patch]), {patch.name}, [path], mini.PRISTINE.__getitem__)
            Series([patch]).apply(path, text)
            Series([patch]).reverse(path, text)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pins(data: st.DataObject) -> None:
    text = pins.Pin("1.0", "1.0", {}, {"vllm/one.py": sha256(b"")}, {"vllm/one.py": sha256(b"1")})
    with contextlib.suppress(OverlayError):
        pins.loads(data.draw(damaged(text.dumps().encode())).decode(errors="replace"))


FILES = ("RECORD", "METADATA", "direct_url.json")
PLACES = [
    *(f"{PACKAGE}/provenance/{name}" for name in ("VERSION_PIN", "patches/series")),
    f"{PACKAGE}/provenance/patches/0001-all.patch",
    *(f"{mini.INFO}/{name}" for name in FILES),
    "vllm/one.py",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("older", [True, False])
def test_an_installation(
    tmp_path_factory: pytest.TempPathFactory,
    ours: Overlay,
    older: bool,
    place: str,
) -> None:
    """By every command; the pin that is installed may agree with the damage."""
    folder = tmp_path_factory.mktemp("fuzz")
    whole = mini.overlaid(folder / "whole")
    if not older:
        run("apply", "--site", whole, "--force", code=Exit.DONE)
    (whole / mini.INFO / "direct_url.json").write_text('{"dir_info": {"editable": false}}')
    kept = (whole / place).read_bytes()

    @settings(max_examples=12, deadline=None)
    @given(data=st.one_of(damaged(kept), st.just(b"[" * 200_000)), agrees=st.booleans())
    def commands(data: bytes, agrees: bool) -> None:
        site = folder / "site"
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(whole, site)
        (site / place).write_bytes(data)
        pin = site / PACKAGE / "provenance" / "VERSION_PIN"
        if agrees and not place.endswith("VERSION_PIN"):
            pin.write_text(pin.read_text().replace(sha256(kept), sha256(data)))
        for command in ("status", "verify", "doctor", "diff", "apply", "revert"):
            options = ["--dry-run"] if command in ("apply", "revert") else []
            assert run(command, "--site", site, *options).returncode in Exit

    commands()


@pytest.mark.parametrize("data", [b"\xff", b"\xff[release]\n"])
def test_a_pin_that_is_no_text_is_named_by_the_author_s_loop(tmp_path: Path, data: bytes) -> None:
    mini.overlay(tmp_path)
    (tmp_path / pins.NAME).write_bytes(data)
    with pytest.raises(OverlayError, match="is not UTF-8"):
        load_unproven(tmp_path)


def test_the_metadata_of_an_editable_install_may_be_nested_without_end(tmp_path: Path) -> None:
    site = mini.install(tmp_path / "site")
    shutil.rmtree(site / "vllm")
    (site / mini.INFO / "direct_url.json").write_bytes(b"[" * 200_000)
    with pytest.raises(OverlayError, match="no vLLM"):
        locate(site=str(site))
