"""No upstream code is committed, and no name of a registry or machine."""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from overlay.patches import parse
from support.sites import OVERLAY, REPO, UPSTREAM

#: Lines that anyone would write, and that are no evidence of a copy.
_TRIVIAL = re.compile(
    r"\W*|(import|from) [\w. ]+( import [\w*, ]+)?|else:|try:|finally:|pass|return( None| self)?|"
    r"break|continue|@(property|classmethod|staticmethod)|raise|if TYPE_CHECKING:|"
    r"def __\w+__\(self\)( -> \w+)?:|\w+: \w+,?|\w+,|self\.(\w+) = \1|main\(\)|"
    r'if __name__ == "__main__":'
)
RUN = 3


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The characteristic lines with their numbers, white space folded."""
    for number, line in enumerate(text.splitlines(), 1):
        folded = " ".join(line.split())
        if not _TRIVIAL.fullmatch(folded):
            yield number, folded


def runs(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """The hash of each run of lines, and the number of its first line."""
    window: list[tuple[int, str]] = []
    for entry in numbered:
        window = [*window, entry][-RUN:]
        if len(window) == RUN:
            yield hash(tuple(line for _, line in window)), window[0][0]


def committed() -> list[Path]:
    """The files that git tracks or would add."""
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


def copies(texts: Mapping[str, str]) -> set[tuple[str, int, str]]:
    """The texts that repeat a run of upstream's lines: name, line number, upstream's file."""
    ours: dict[int, list[tuple[str, int]]] = {}
    words: set[str] = set()
    for name, text in texts.items():
        numbered = list(lines(text))
        words.update(line for _, line in numbered)
        for run, number in runs(numbered):
            ours.setdefault(run, []).append((name, number))
    copied = set()
    files = sorted((UPSTREAM / "vllm").rglob("*.py"))
    assert len(files) > 1000
    for file in files:
        text = file.read_text(errors="replace")
        # Few files have enough lines in common to be looked at closely.
        if len(words.intersection(" ".join(line.split()) for line in text.splitlines())) < RUN:
            continue
        for run, _ in runs(lines(text)):
            copied |= {(*place, str(file.relative_to(UPSTREAM))) for place in ours.get(run, ())}
    return copied


def test_no_committed_file_holds_lines_of_upstream() -> None:
    """And copied lines are found however they are indented."""
    path = "vllm/v1/worker/gpu_model_runner.py"
    source = (UPSTREAM / path).read_text().splitlines()
    start = next(n for n, line in enumerate(source) if "def _bookkeeping_sync" in line)
    planted = ["our = 1", *(line.strip() for line in source[start : start + 12])]
    texts = {str(file): own_text(file) for file in committed()}
    assert str(REPO / "Makefile") in texts
    hits = copies(texts | {"planted": "\n".join(planted), "one line": source[start]})
    assert ("planted", 2, path) in hits
    assert {hit for hit in hits if hit[0] != "planted"} == set()


def test_the_patches_are_without_context() -> None:
    for patch in OVERLAY.series.patches:
        for file in patch.files:
            for hunk in file.hunks:
                assert not set(hunk.old) & set(hunk.new), f"{patch.name} quotes a line it keeps"


@pytest.mark.parametrize(
    "name",
    [
        r"pypi\.(org|python)|pythonhosted|registry\.npmjs|npmjs\.org|deb\.debian\.org",
        r"/(home|root|work|tmp/w)/\w",
    ],
)
def test_nothing_names_a_registry_or_a_machine(name: str) -> None:
    here = Path(__file__)
    hits = [
        f"{file.relative_to(REPO)}: {line}"
        for file in committed()
        if file != here
        for line in file.read_text(errors="replace").splitlines()
        if re.search(name, line)
    ]
    assert hits == []
