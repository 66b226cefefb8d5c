"""What proves a wheel, and which wheels are refused."""

from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from overlay.pin import Pin, sha256
from review import wheels
from support.releases import FILES, NAME, PIN, TARGET, VERSION, wheel
from support.sites import snapshot


def opened(tmp_path: Path, data: bytes, name: str = NAME) -> wheels.Release:
    """The wheel with these bytes, obtained as a file whose checksum is known."""
    (tmp_path / name).write_bytes(data)
    return wheels.obtain(str(tmp_path / name), sha256(data), tmp_path / "kept", PIN)


# What proves a wheel file


@pytest.mark.parametrize("written", ["{}", " sha256:{}\n", "SHA256={}"])
def test_a_wheel_with_its_checksum_is_read_without_being_unpacked(
    tmp_path: Path, written: str
) -> None:
    (tmp_path / NAME).write_bytes(wheel())
    digest = written.format(sha256(wheel()).upper())
    release = wheels.obtain(str(tmp_path / NAME), digest, tmp_path / "kept", PIN)
    assert (release.version, release.wheel) == (VERSION, NAME)
    assert (release.sha256, release.proof) == (sha256(wheel()), wheels.GIVEN)
    assert release.upstream.paths == ("vllm/__init__.py", TARGET)
    assert release.upstream.read(TARGET) == FILES[TARGET]
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_pinned_wheel_proves_itself(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(wheel())
    pin = Pin("1.0.0", "0.1.0", {"released.whl": sha256(wheel())}, PIN.upstream, {})
    release = wheels.obtain(str(tmp_path / NAME), None, tmp_path / "kept", pin)
    assert release.proof == wheels.PINNED
    assert list(snapshot(tmp_path)) == [NAME]


@pytest.mark.parametrize(
    ("name", "pinned", "given", "reason"),
    [
        (NAME, sha256(wheel()), "0" * 64, "SHA256 is another wheel's"),
        (NAME, "0" * 64, None, "VERSION_PIN has another"),
        ("torch-2.0-py3-none-any.whl", "0" * 64, None, "no index was asked"),
    ],
)
def test_an_unproven_wheel_is_refused(
    tmp_path: Path, name: str, pinned: str, given: str | None, reason: str
) -> None:
    (tmp_path / name).write_bytes(wheel())
    pin = Pin("1.0.0", "0.1.0", {NAME: pinned}, PIN.upstream, {})
    with pytest.raises(OverlayError, match=reason) as caught:
        wheels.obtain(str(tmp_path / name), given, tmp_path / "kept", pin)
    assert caught.value.code == Exit.RELEASE
    assert caught.value.expected == (f"SHA-256 {'0' * 64}" if name == NAME else None)
    assert caught.value.found == f"SHA-256 {sha256(wheel())}"
    assert list(snapshot(tmp_path)) == [name]


@pytest.mark.parametrize(
    ("wanted", "digest", "reason"),
    [
        *((text, None, "neither a version nor a wheel file") for text in ("", "--help", "1.*")),
        ("1.2.0; python_version>'3'", None, "neither a version nor a wheel file"),
        (f"missing/{NAME}", None, "cannot be read"),
        (__file__, None, "is not named as wheels are"),
        *((NAME, d, "is not a SHA-256") for d in ("0" * 63, "0" * 65, "g" * 64, "md5:" + "0" * 64)),
    ],
)
def test_a_wrong_argument_is_refused(
    tmp_path: Path, wanted: str, digest: str | None, reason: str
) -> None:
    with pytest.raises(OverlayError, match=reason) as caught:
        wheels.obtain(wanted, digest, tmp_path, PIN)
    assert caught.value.code == Exit.USAGE
    assert not list(tmp_path.iterdir())


def test_a_wheel_file_is_named_by_the_command_that_repeats_it(tmp_path: Path) -> None:
    """Its version alone would review another archive, or none."""
    name = NAME.replace("1.2.0", "1.2.0+cpu.1")
    (tmp_path / name).write_bytes(wheel(version="1.2.0+cpu.1"))
    digest = sha256(wheel(version="1.2.0+cpu.1"))
    release = wheels.obtain(str(tmp_path / name), digest, tmp_path, PIN)
    assert release.command == f"make review RELEASE={name} SHA256={digest}"
    assert release.archives == {name: digest}


# The archive


ANOTHER = "is of another version than it was asked for as"
WHOLE = wheel()


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (wheel({"vllm/__init__.py": b""}), Exit.RELEASE, f"lacks {TARGET}: all files that patches"),
        *(
            (wheel(FILES | {name: b""}), Exit.FOREIGN, f"holds {name!r}, a path that is not safe")
            for name in ("vllm/../../a.py", "vllm/./a.py", "vllm//a.py", "vllm/..\\a.py")
        ),
        (
            wheel(FILES | {"torch-2.0.dist-info/METADATA": b""}),
            *(Exit.FOREIGN, "holds 2 files of METADATA"),
        ),
        (
            wheel(without=f"vllm-{VERSION}.dist-info/METADATA"),
            *(Exit.FOREIGN, "holds 0 files of METADATA"),
        ),
        (wheel(version="newest"), Exit.FOREIGN, "'newest' is invalid for 'version'"),
        (wheel(field="Requires-Dist: a=2"), Exit.FOREIGN, "'a=2' is invalid for 'requires-dist'"),
        (wheel(field="Requires-Python: 3"), Exit.FOREIGN, "'3' is invalid for 'requires-python'"),
        (wheel(version="1.2.1"), Exit.RELEASE, ANOTHER),
        (wheel(version="1.2.0rc1"), Exit.RELEASE, ANOTHER),
        (wheel(project="vllm-tpu"), Exit.RELEASE, "is not a wheel of vLLM"),
        *(
            (data, Exit.FOREIGN, "is no whole zip file")
            for data in (b"", b"text", WHOLE[:-30], WHOLE[40:], WHOLE[: len(WHOLE) // 2])
        ),
    ],
)
def test_a_wheel_out_of_order_is_refused(
    tmp_path: Path, data: bytes, code: Exit, reason: str
) -> None:
    with pytest.raises(OverlayError) as caught:
        opened(tmp_path, data)
    assert (caught.value.code, reason in caught.value.reason) == (code, True)
    assert list(snapshot(tmp_path)) == [NAME]


def test_a_build_of_the_version_is_of_the_version(tmp_path: Path) -> None:
    assert opened(tmp_path, wheel(version="1.2+cpu", project="vLLM")).version == "1.2+cpu"
