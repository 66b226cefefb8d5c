"""No upstream code is committed, and nothing else that does not belong here."""

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from overlay.patches import parse
from support.sites import OVERLAY, REPO, UPSTREAM

#: Lines that anyone would write: they say nothing about where a file came from.
_TRIVIAL = re.compile(
    r"\W*|(import|from) [\w. ]+( import [\w*, ]+)?|else:|try:|finally:|pass|return( None| self)?|"
    r"break|continue|@(property|classmethod|staticmethod)|raise|if TYPE_CHECKING:|"
    r"def __\w+__\(self\)( -> \w+)?:|\w+: \w+,?|\w+,|self\.(\w+) = \1|main\(\)|"
    r'if __name__ == "__main__":'
)
RUN = 3


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers, white space folded."""
    for number, line in enumerate(text.splitlines(), 1):
        folded = " ".join(line.split())
        if not _TRIVIAL.fullmatch(folded):
            yield number, folded


def runs(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """The hash of each run of lines, and the number of the line it begins with."""
    window: list[tuple[int, str]] = []
    for entry in numbered:
        window = [*window, entry][-RUN:]
        if len(window) == RUN:
            yield hash(tuple(line for _, line in window)), window[0][0]


@pytest.fixture(scope="module")
def upstream() -> dict[int, str]:
    """Every run of lines in every Python file of the pinned release."""
    known: dict[int, str] = {}
    for file in sorted((UPSTREAM / "vllm").rglob("*.py")):
        for digest, _ in runs(lines(file.read_text(errors="replace"))):
            known.setdefault(digest, str(file.relative_to(UPSTREAM)))
    assert len(known) > 200_000
    return known


def committed() -> list[Path]:
    """The files that git tracks, and those it would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    files = [REPO / name for name in listed.split("\0") if name]
    return [file for file in files if file.is_file()]


def own_text(file: Path) -> str:
    """A file's text; of a patch, its header and the lines it adds."""
    text = file.read_text(errors="replace")
    if file.suffix != ".patch":
        return text
    patch = parse(file.name, file.read_bytes())
    added = [line for f in patch.files for h in f.hunks for line in h.new]
    return patch.header + b"".join(added).decode()


def findings(text: str, upstream: dict[int, str]) -> list[tuple[int, str]]:
    return [(at, upstream[run]) for run, at in runs(lines(text)) if run in upstream]


def test_no_committed_file_holds_lines_of_upstream(upstream: dict[int, str]) -> None:
    files = committed()
    assert REPO / "Makefile" in files
    found = {file: findings(own_text(file), upstream) for file in files}
    assert {file: hits for file, hits in found.items() if hits} == {}


def test_copied_lines_are_found_however_they_are_indented(upstream: dict[int, str]) -> None:
    source = (UPSTREAM / OVERLAY.targets[-1]).read_text().splitlines()
    at = next(n for n, line in enumerate(source) if "def _bookkeeping_sync" in line)
    copied = "\n".join(["our = 1"] + [line.strip() for line in source[at : at + 12]])
    assert findings(copied, upstream)
    assert not findings("\n".join(source[at : at + 1]), upstream)


def test_the_patches_are_without_context() -> None:
    for patch in OVERLAY.series.patches:
        for file in patch.files:
            for hunk in file.hunks:
                assert not set(hunk.old) & set(hunk.new), f"{patch.name} quotes a line it keeps"


@pytest.mark.parametrize(
    "what",
    [
        r"pypi\.(org|python)|pythonhosted|registry\.npmjs|npmjs\.org|deb\.debian\.org",
        r"/(home|root|work|tmp/w)/\w",
    ],
)
def test_nothing_names_a_registry_or_a_machine(what: str) -> None:
    here = Path(__file__)
    found = [
        f"{file.relative_to(REPO)}: {line}"
        for file in committed()
        if file != here
        for line in file.read_text(errors="replace").splitlines()
        if re.search(what, line)
    ]
    assert found == []
