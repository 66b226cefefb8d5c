"""What our modules re-implement of upstream's, by their own word, and what of it has changed.

A module says so in comments, one name each, where it does so:

    # mirrors: vllm.v1.sample.ops.penalties:apply_penalties

The name is of a function, a class, a constant or an attribute that the pinned release has. What
a module does in place of such a name gives the same bits only while that has not changed, and no
patch and no call fails if it has. A module that does nothing in upstream's place says
``# mirrors: nothing``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE

from review.definitions import Definition, Definitions
from review.findings import COLUMNS, Finding, finding, listed, module_of_ours, rows

#: The word of a module that mirrors nothing.
NOTHING = "nothing"

_LINE = re.compile(r"^[ \t]*# mirrors: (.*)$", re.MULTILINE)
_NAME = re.compile(r"(vllm(?:\.\w+)*):(\w+(?:\.\w+)*)")


@dataclass(frozen=True)
class Mirror:
    """A name of upstream's that one of our modules re-implements.

    Attributes:
        ours: path of our module below ``vendor_overlay``.
        line: of the comment, one-based.
        module: upstream's, dotted.
        name: qualified.
    """

    ours: str
    line: int
    module: str
    name: str


def words(text: str) -> list[tuple[int, str]]:
    """What one module says it mirrors: line and word of each comment."""
    return [
        (text.count("\n", 0, match.start()) + 1, match[1].strip()) for match in _LINE.finditer(text)
    ]


def declared(root: Path) -> list[Mirror]:
    """The mirrors of an overlay's modules.

    Args:
        root: of the checkout.

    Raises:
        OverlayError: a comment cannot be read.
    """
    folder = root / "vendor_overlay"
    mirrors = []
    for file in sorted((folder / PACKAGE).rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        for line, word in words(file.read_text()):
            if word == NOTHING:
                continue
            match = _NAME.fullmatch(word)
            if match is None:
                raise _refusal(path, line, f"{word!r} is no name of upstream's")
            mirrors.append(Mirror(path, line, match[1], match[2]))
    return mirrors


def resolve(mirrors: Iterable[Mirror], base: Definitions) -> list[tuple[Mirror, Definition]]:
    """The definition of each mirrored name in the pinned release.

    Raises:
        OverlayError: the release has no such name.
    """
    pairs = []
    for mirror in mirrors:
        definition = base.find(mirror.module, mirror.name)
        if definition is None:
            problem = f"{mirror.module}:{mirror.name} is not in the pinned release"
            raise _refusal(mirror.ours, mirror.line, problem)
        pairs.append((mirror, definition))
    return pairs


def examine(
    mirrors: Sequence[tuple[Mirror, Definition]],
    base: Definitions,
    release: Definitions,
    known: Collection[str],
) -> list[Finding]:
    """What of the mirrored names has changed, moved or gone.

    Args:
        mirrors: those of :func:`resolve`.
        base: the release that the overlay is for.
        release: the one under review.
        known: full names of definitions whose change is shown elsewhere: no diff is made.

    Returns:
        The entries under "mirrors" in review.json.

    Raises:
        OverlayError: a source cannot be parsed, or git fails.
    """
    by_name: dict[str, list[tuple[Mirror, Definition]]] = {}
    for mirror, definition in mirrors:
        by_name.setdefault(definition.full_name, []).append((mirror, definition))
    classes = [name for name, pairs in by_name.items() if pairs[0][1].kind == "class"]
    found = []
    for name, pairs in sorted(by_name.items()):
        mirror, definition = pairs[0]
        place = mirror.module, mirror.name
        ours = sorted({mirror.ours for mirror, _ in pairs})
        why = f"mirrored by {', '.join(map(module_of_ours, ours))}"
        elsewhere = known
        if definition.kind == "class":
            elsewhere = ()  # the other sections show one member at a time
        elif any(name.startswith(f"{cls}.") for cls in classes):
            elsewhere = (name,)
        found.append(finding(base, release, place, definition, why, ours, elsewhere))
    return [each for each in found if each is not None]


def warnings(findings: Sequence[Finding]) -> Iterator[str]:
    """What needs eyes, by our modules."""
    by_module: dict[str, list[str]] = {}
    for each in findings:
        for module in each["ours"]:
            by_module.setdefault(module, []).append(each["what"])
    for module, names in sorted(by_module.items()):
        yield (
            f"{module_of_ours(module)} re-implements what has changed, and may give other bits "
            f"now: {listed(names)}"
        )


def section(
    findings: Sequence[Finding], versions: tuple[str, str]
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows; the versions are of the base and of the release."""
    heading = f"What we re-implement: {len(findings):,} changed"
    return heading, "mirrors", COLUMNS, rows(findings, versions)


def _refusal(path: str, line: int, problem: str) -> OverlayError:
    return OverlayError(
        Exit.FAULT,
        f"line {line}: what the module mirrors cannot be checked: {problem}",
        subject=f"vendor_overlay/{path}",
        next_step="write `# mirrors: vllm.module:name` with a name of the pinned release, or "
        "`# mirrors: nothing`",
    )
