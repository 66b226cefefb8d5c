"""VLLM_READINESS."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.readiness import switch
from vllm.v1.readiness.features import FEATURES

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


def test_the_switch_imports_neither_torch_nor_the_logger() -> None:
    """vllm.envs imports it, long before either may be imported."""
    path = switch.__file__.removesuffix("/v1/readiness/switch.py")
    program = f"""if True:
        import sys, types
        for name, path in (("vllm", {path!r}), ("vllm.v1", {path + "/v1"!r})):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
        import vllm.v1.readiness.switch
        print(sorted(m for m in sys.modules if m.startswith(("torch", "vllm"))))
    """
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == str(
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
