"""VERSION_PIN is read strictly, and by sha256sum as well."""

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay import pin
from overlay.errors import Exit, OverlayError
from support.sites import OVERLAY, REPO, run, small

DIGEST = st.text("0123456789abcdef", min_size=64, max_size=64)
NAME = st.from_regex(r"[a-z][a-z0-9_]{0,8}\.py", fullmatch=True)


@settings(max_examples=25)
@given(
    st.dictionaries(NAME, DIGEST),
    st.dictionaries(
        NAME.map("vllm/{}".format), st.tuples(DIGEST, DIGEST).filter(lambda p: p[0] != p[1])
    ),
    st.dictionaries(NAME.map("vllm/v1/readiness/{}".format), DIGEST),
)
def test_what_is_written_is_read_back(
    archives: dict[str, str], changed: dict[str, tuple[str, str]], added: dict[str, str]
) -> None:
    upstream = {path: old for path, (old, _) in changed.items()}
    result = {path: new for path, (_, new) in changed.items()} | added
    written = pin.Pin("1.0.0", "1.2.3", archives, upstream, result)
    assert pin.loads(written.dumps()) == written
    assert pin.loads(written.dumps()).added == sorted(added)


BASE = OVERLAY.pin.dumps()
SUM = "0" * 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((f"vllm = {OVERLAY.pin.release}\n", ""), "lacks vllm"),
        (("[result]", "[results]"), "unknown section"),
        (("[upstream]\n", f"[upstream]\n{SUM}  vllm/../evil.py\n"), "not a path inside"),
        (("[upstream]\n", f"[upstream]\n{SUM}  vllm/lone.py\n"), "lacks vllm/lone.py"),
        (("[upstream]\n", f"[upstream]\n{SUM}  vllm/envs.py\n"), "listed twice"),
        (("[upstream]\n", "[upstream]\nnonsense\n"), "not a line of the format"),
        (("overlay = ", "overlay = \x1b[2J"), "not a line of the format"),
        (("[result]\n", f"[result]\n{SUM}  {pin.PACKAGE}/\x1b[2J\n"), "not a path inside"),
        (("[result]\n", f"[result]\n{SUM}  vllm/elsewhere.py\n"), "added outside"),
        (
            (OVERLAY.pin.upstream["vllm/envs.py"], OVERLAY.pin.result["vllm/envs.py"]),
            "same checksum before and after",
        ),
    ],
)
def test_a_contradiction_is_refused(change: tuple[str, str], reason: str) -> None:
    assert change[0] in BASE
    with pytest.raises(OverlayError, match=reason) as caught:
        pin.loads(BASE.replace(*change, 1))
    assert caught.value.code is Exit.FAULT


def test_sha256sum_reads_it(tmp_path: Path) -> None:
    """By the documents' command, and by the one that the file itself shows for upstream's."""
    page = (REPO / "docs" / "releases.md").read_text()
    command = re.search(r"(sed -n .*sha256sum -c)$", page, re.MULTILINE)
    assert command
    pristine = rf"sed -n '/^\[upstream\]/,/^$/p' {REPO}/VERSION_PIN | sha256sum -c 2>/dev/null"
    site = small(tmp_path / "site")

    def codes() -> list[int]:
        shells = (["bash", "-c", f"set -o pipefail; {text}"] for text in (pristine, command[1]))
        return [subprocess.run(shell, cwd=site, check=False).returncode for shell in shells]

    assert codes() == [0, 1]
    assert run("apply", "--site", site).returncode == 0
    assert codes() == [1, 0]
    (site / "vllm" / "envs.py").write_text("")
    assert codes() == [1, 1]
