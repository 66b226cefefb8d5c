"""VLLM_READINESS and VLLM_READINESS_PROBE."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readiness.alone import run_alone
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import startup

NEEDY = {"penalties", "bad-words", "thinking-budget"}
EVERYTHING = set(registry.ALL)


@pytest.mark.parametrize(
    ("value", "on"),
    [
        *(("", EVERYTHING), (" on ", EVERYTHING), ("off", set())),
        ("-penalties, -history", EVERYTHING - {"history"} - NEEDY),
        ("penalties,allowed-tokens", {"penalties", "history", "allowed-tokens"}),
        ("fixes, readback", set(registry.FIXES) | {"readback"}),
    ],
)
def test_a_value_turns_features_and_fixes_on(value: str, on: set[str]) -> None:
    assert switch.parse(value) == on


@pytest.mark.parametrize(
    ("value", "problem", "meant"),
    [
        ("banana", "'banana' is not understood", None),
        ("ON", "'ON' is not understood", "on"),
        ("on,penalties", "'on' is not understood", "penalties"),
        ("off,-history", "'off' is not understood", "-history"),
        ("penalties,,history", "'' is not understood", "penalties,history"),
        ("-penalty", "'-penalty' is not understood", "-penalties"),
        ("-off", "'-off' is not understood", None),
        ("--fixes", "'--fixes' is not understood", "-fixes"),
        ("penalties,-history", "names with '-' (all but these) and names without", "-history"),
    ],
)
def test_other_values_are_refused_with_the_probable_line(
    value: str, problem: str, meant: str | None
) -> None:
    with pytest.raises(switch.SwitchError) as caught:
        switch.parse(value)
    message = str(caught.value)
    assert message.startswith(f"VLLM_READINESS={value!r}: ")
    assert problem in message
    assert all(name in message for name in ("on, off", *registry.GROUPS, *registry.ALL))
    assert (f"Did you mean VLLM_READINESS={meant}? " in message) == (meant is not None)
    assert ("Did you mean" in message) == (meant is not None)
    if meant is not None:
        switch.parse(meant)


@pytest.mark.parametrize("word", registry.REMOVED)
def test_a_removed_word_is_refused_with_what_takes_its_place(word: str) -> None:
    with pytest.raises(switch.SwitchError, match=f"{word} was removed: ") as caught:
        switch.parse(f"-{word},-history")
    assert registry.REMOVED[word] in str(caught.value)
    assert "Did you mean VLLM_READINESS=-history? " in str(caught.value)


WORDS = st.sampled_from(sorted(registry.ALL | set(registry.GROUPS)))


@given(st.lists(WORDS, min_size=1))
def test_all_but_these_and_only_these(words: list[str]) -> None:
    """What builds on a feature goes with it, or brings it along."""
    named = frozenset().union(*(registry.GROUPS.get(word, {word}) for word in words))
    needs = {name: word.needs for name, word in registry.WORDS.items()}
    only = switch.parse(",".join(words))
    but = switch.parse(",".join(f"-{word}" for word in words))
    assert only == named.union(*(needs[word] for word in only))
    assert but == {word for word in registry.ALL - named if but.issuperset(needs[word])}


@given(st.text())
def test_no_text_is_misread(value: str) -> None:
    try:
        switch.parse(value)
    except switch.SwitchError as error:
        assert str(error).endswith("Unset it to have everything on.")
        return
    words = {word.strip().removeprefix("-") for word in value.split(",")}
    assert words <= registry.ALL | set(registry.GROUPS) | {"", "on", "off"}


def test_the_variable_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.NAME, "off")
    assert switch.VARIABLES["VLLM_READINESS"]() == frozenset()
    monkeypatch.setenv(switch.NAME, "banana")
    with pytest.raises(switch.SwitchError, match=r"^VLLM_READINESS='banana'"):
        switch.enabled()
    monkeypatch.delenv(switch.NAME)
    assert switch.enabled() == registry.ALL


def test_what_is_not_installed_is_off_whatever_the_variable_says() -> None:
    """In a process of its own, because an installation never changes while it runs."""
    said = run_alone("""
import os
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import identity, switch
identity.left_out = lambda: frozenset({"history", "sessions"})
print(sorted(registry.ALL - switch.enabled()))
os.environ["VLLM_READINESS"] = "penalties,readback"
print(sorted(switch.enabled()))
""")
    off = sorted({"history", "sessions"} | NEEDY)
    assert said.splitlines() == [str(off), "['readback']"]


def test_the_switch_imports_neither_torch_nor_the_logger() -> None:
    """vllm.envs imports it, long before either may be imported."""
    loaded = run_alone("""
before = set(sys.modules)
from vllm.v1.readiness.engine import switch
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("torch", "vllm"))))
""")
    names = ("", ".engine", ".engine.doors", ".engine.identity", ".engine.switch", ".registry")
    assert loaded.split() == [f"vllm.v1.readiness{name}" for name in names]


@pytest.mark.parametrize(("value", "read"), [(None, None), ("  ", None), ("0", None), (" 1", "1")])
def test_the_probe_is_off_by_default_and_needs_no_file(
    value: str | None, read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(switch.PROBE, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.PROBE, value)
    assert switch.VARIABLES["VLLM_READINESS_PROBE"]() == read


def test_the_file_is_relative_to_where_the_process_started(
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
def test_a_file_that_cannot_be_written_is_refused_with_the_next_step(
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


@pytest.mark.parametrize("name", [switch.RANKS, switch.SYNC_GUARD])
@pytest.mark.parametrize("value", ["warning", "ON", "warn,error", "1"])
def test_an_engine_with_another_mode_does_not_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Also one of a single rank, and where there is nothing to guard."""
    monkeypatch.setenv(name, value)
    with pytest.raises(switch.SwitchError, match=r"Valid: off, warn, error\.") as caught:
        startup.start(object())
    assert (caught.value.name, caught.value.value) == (name, value)
    assert f"{value!r} is not understood" in str(caught.value)


@pytest.mark.parametrize(("value", "count"), [("", None), (" ", None), ("0", 0), (" 12 ", 12)])
def test_the_number_of_slots(
    monkeypatch: pytest.MonkeyPatch, value: str, count: int | None
) -> None:
    monkeypatch.setenv(switch.SLOTS, value)
    assert switch.slots() == count


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "1_0", "\u0661", "0x4"])
def test_another_number_of_slots_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(switch.SLOTS, value)
    with pytest.raises(switch.NumberError, match="0 or more, or unset"):
        switch.slots()
    with pytest.raises(switch.NumberError):
        startup.start(object())
