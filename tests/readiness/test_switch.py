"""VLLM_READINESS and VLLM_READINESS_PROBE."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.readiness import startup, switch
from vllm.v1.readiness.features import FEATURES

PACKAGE = str(Path(switch.__file__).parents[2])
KNOWN = ("history", "penalties", "thinking-budget")


@pytest.mark.parametrize(
    ("value", "on"),
    [
        ("", set(KNOWN)),
        ("on", set(KNOWN)),
        (" on ", set(KNOWN)),
        ("off", set()),
        ("penalties", {"history", "thinking-budget"}),
        ("penalties, history", {"thinking-budget"}),
        ("penalties,penalties", {"history", "thinking-budget"}),
    ],
)
def test_what_is_left_on(value: str, on: set[str]) -> None:
    assert switch.parse(value, KNOWN) == on


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("banana", ("banana",)),
        ("ON", ("ON",)),
        ("on,penalties", ("on",)),
        ("off,history", ("off",)),
        ("penalties,,history", ("",)),
        ("1", ("1",)),
    ],
)
def test_anything_else_is_refused_with_the_valid_words(value: str, words: tuple[str]) -> None:
    with pytest.raises(switch.SwitchError) as caught:
        switch.parse(value, KNOWN)
    assert caught.value.words == words
    for valid in ("on, off", *KNOWN):
        assert valid in str(caught.value)


@given(st.text())
def test_no_text_is_misread(value: str) -> None:
    try:
        on = switch.parse(value, KNOWN)
    except switch.SwitchError:
        return
    off = set(KNOWN) - on
    assert value.strip() in ("", "on", "off") or off == {w.strip() for w in value.split(",")}


def test_feature_names_are_words_of_the_switch() -> None:
    for name in FEATURES:
        assert name not in ("on", "off")
        assert name == name.strip().lower()
        assert "," not in name


def test_the_variable_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.NAME, "off")
    assert switch.VARIABLES["VLLM_READINESS"]() == frozenset()
    monkeypatch.setenv(switch.NAME, "banana")
    with pytest.raises(switch.SwitchError, match=r"^VLLM_READINESS='banana'"):
        switch.enabled()
    monkeypatch.delenv(switch.NAME)
    assert switch.enabled() == frozenset(FEATURES)


#: Imports the switch of this checkout, and as little else as it needs.
ALONE = f"""
import os, sys, types
for name, path in (("vllm", {PACKAGE!r}), ("vllm.v1", {PACKAGE + "/v1"!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from vllm.v1.readiness import switch
"""


def alone(program: str, **environment: str) -> str:
    """What ``program`` prints, which finds the switch imported."""
    return subprocess.run(
        [sys.executable, "-c", ALONE + program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    ).stdout.strip()


def test_the_switch_imports_neither_torch_nor_the_logger() -> None:
    """vllm.envs imports it, long before either may be imported."""
    loaded = alone("print(sorted(m for m in sys.modules if m.startswith(('torch', 'vllm'))))")
    assert loaded == str(
        ["vllm", "vllm.v1"] + [f"vllm.v1.readiness{name}" for name in ("", ".features", ".switch")]
    )


@pytest.mark.parametrize(
    ("value", "on"),
    [("", {"history", "penalties"}), ("history", set()), ("penalties", {"history"})],
)
def test_a_feature_is_off_with_what_it_needs(
    value: str, on: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.NAME, value)
    assert switch.enabled() >= on
    assert switch.enabled() & {"history", "penalties"} == on


@pytest.mark.parametrize("value", [None, "", "  "])
def test_without_a_file_nothing_is_recorded(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(switch.PROBE, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.PROBE, value)
    assert switch.VARIABLES["VLLM_READINESS_PROBE"]() is None


def test_the_file_is_where_the_process_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.PROBE, str(tmp_path / "probe"))
    assert switch.VARIABLES["VLLM_READINESS_PROBE"]() == str(tmp_path / "probe")
    (tmp_path / "probe").write_bytes(b"of an earlier run")
    assert switch.probe() == str(tmp_path / "probe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(switch.PROBE, "a run")
    file = switch.probe()
    monkeypatch.chdir("/")
    assert file == str(tmp_path / "a run")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing/probe", "there is no directory {}/missing. Make it,"),
        ("file/probe", "there is no directory {}/file. Make it,"),
        (".", "this is a directory. Name a file, such as {}/probe;"),
        ("new/", "this is a directory. Name a file, such as {}/new/probe;"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_the_next_step(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    value = f"{tmp_path}/{name}"
    monkeypatch.setenv(switch.PROBE, value)
    with pytest.raises(switch.PathError) as caught:
        switch.probe()
    assert (caught.value.name, caught.value.value) == ("VLLM_READINESS_PROBE", value)
    assert str(caught.value).startswith(f"VLLM_READINESS_PROBE={value!r}: ")
    assert sentence.format(tmp_path) in str(caught.value)
    assert "unset it" in str(caught.value)


def test_a_directory_that_this_user_may_not_write_to_is_refused() -> None:
    program = """
if os.geteuid() == 0:
    os.setuid(65534)
try:
    switch.probe()
except switch.PathError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o555)
        said = alone(program, VLLM_READINESS_PROBE=f"{folder}/probe")
    assert f"this user may not write to {folder}. Allow it," in said


@pytest.mark.parametrize(("value", "count"), [("", None), (" ", None), ("0", 0), (" 12 ", 12)])
def test_how_many_slots_there_may_be(
    monkeypatch: pytest.MonkeyPatch, value: str, count: int | None
) -> None:
    monkeypatch.setenv(switch.SLOTS, value)
    assert switch.slots() == count


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "1_0", "\u0661", "0x4"])
def test_a_number_of_slots_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(switch.SLOTS, value)
    with pytest.raises(switch.NumberError, match="0 or more, or unset"):
        switch.slots()
    with pytest.raises(switch.NumberError):
        startup.start(object())
