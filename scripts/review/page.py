"""The page of a review: the values that its template shows."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pages
from markupsafe import Markup

from review import phrases
from review.highlighting import Line, highlighted, html, visible
from review.phrases import Review
from review.text_diff import Hunk, Row, compare, lines_of

TEMPLATE = "page.html.j2"
#: Unfolds the sections around the target of a link; without scripts a reader does so by hand.
SCRIPT = """
const show = () => {
  let name = location.hash.slice(1);
  try { name = decodeURIComponent(name); } catch { return; }
  const target = document.getElementById(name);
  if (!target) return;
  for (let each = target; each; each = each.parentElement)
    if (each.tagName === 'DETAILS') each.open = true;
  target.scrollIntoView();
};
addEventListener('hashchange', show);
addEventListener('click', event => {
  const link = event.target.closest('a[href^="#"]');
  if (link && link.hash === location.hash) show();
});
show();
"""
#: The CSS class of each verdict and fate.
_MOODS = {
    **dict.fromkeys(("clean", "applies", "same"), "good"),
    **dict.fromkeys(("needs eyes", "moved", "obsolete", "adopted", "body"), "eyes"),
    **dict.fromkeys(("conflicts", "gone", "signature"), "bad"),
}
_ROWS = {"same": "", "changed": " class=x", "gone": " class=g", "new": " class=n"}
_HEADING = re.compile(r"(\s*)((?:async )?def|class)\s+(\w+)")


@dataclass(frozen=True)
class FileTexts:
    """The four texts of a file that the patches change.

    Attributes:
        base: that of the overlay's own release, pristine.
        release: that of the release under review.
        overlaid: base with the patches.
        candidate: release with the rebased patches; None if they conflict.
    """

    base: str
    release: str
    overlaid: str
    candidate: str | None


def render(review: Review, texts: Mapping[str, FileTexts]) -> str:
    """The review as one HTML page that loads nothing else.

    Args:
        review: the contents of ``review.json``.
        texts: the texts of each file that the patches change, by its path.
    """
    environment = pages.environment(Path(__file__).parent)
    environment.filters["mood"] = lambda verdict: _MOODS.get(verdict, "")
    anchors = _Anchors()
    targets = list(_targets(review, texts, anchors))
    view = {
        "review": review,
        "title": phrases.title(review),
        "verdict": phrases.verdict(review),
        "counted": phrases.counted,
        "fates": phrases.FATES,
        "summary": phrases.patches(review),
        "patches": _patches(
            review, {target["path"]: target["anchor"] for target in targets}, anchors
        ),
        "changed": [_name(name, anchors) for name in phrases.changed(review)],
        "unchanged": [_name(name, anchors) for name in phrases.unchanged(review)],
        "targets": targets,
        "candidate": None if review["own"] else review.get("candidate"),
        "rebase": re.sub(r"^make review\b", "make rebase", review["command"]),
        "script": Markup(SCRIPT),  # noqa: S704 (ours)
        "script_digest": b64encode(sha256(SCRIPT.encode()).digest()).decode(),
    }
    return environment.get_template(TEMPLATE).render(view)


class _Anchors:
    """The ids of a page, each used once."""

    def __init__(self) -> None:
        self._given: set[str] = {"patches", "warnings", "names", "files", "candidate", "how"}

    def give(self, kind: str, name: str) -> str:
        """An unused id for a name, of characters that need no quoting."""
        slug = f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-') or 'x'}"
        anchor, number = slug, 1
        while anchor in self._given:
            number += 1
            anchor = f"{slug}-again-{number}"
        self._given.add(anchor)
        return anchor


def _name(name: Review, anchors: _Anchors) -> dict[str, Any]:
    return {**name, "anchor": anchors.give("name", name["name"])}


def _patches(review: Review, targets: Mapping[str, str], anchors: _Anchors) -> list[dict[str, Any]]:
    patches = []
    for patch in review["patches"]:
        number = re.match(r"\d+", patch["name"])
        anchor = anchors.give("patch", number[0] if number else patch["name"])
        files = []
        for nth, file in enumerate(patch["files"], 1):
            file_anchor = f"{anchor}-file-{nth}"
            hunks = [
                {**hunk, **_hunk_html(hunk), "anchor": f"{file_anchor}-hunk-{number}"}
                for number, hunk in enumerate(file["hunks"], 1)
            ]
            target = targets.get(file["path"])
            files.append({**file, "hunks": hunks, "anchor": file_anchor, "target": target})
        patches.append({**patch, "files": files, "anchor": anchor})
    return patches


def _hunk_html(hunk: Review) -> dict[str, Any]:
    """A hunk's texts as HTML: three beside one another for a conflict, otherwise two."""
    base, ours, theirs = (list(hunk[text]) for text in ("base", "ours", "theirs"))
    if hunk["verdict"] == "conflicts" or theirs:
        return {
            "three": [
                _marked(base, [*_differing(ours, base), *_differing(theirs, base)]),
                _marked(ours, _differing(base, ours)),
                _marked(theirs, _differing(base, theirs)),
            ]
        }
    lines = (_snippet(base), _snippet(ours))
    rows = (_row(row, lines, numbers=False) for part in compare(base, ours) for row in part.rows)
    return {"three": None, "rows": Markup("").join(rows)}


def _snippet(lines: Sequence[str]) -> tuple[Line, ...]:
    """Lines of a file, highlighted; indentation does not matter to the lexer."""
    snippet = highlighted("\n".join(lines))
    return snippet + ((),) * (len(lines) - len(snippet))


def _differing(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The indices of the lines of ``other`` that differ from ``one``."""
    rows = (row for hunk in compare(one, other) for row in hunk.rows)
    return [row.right for row in rows if row.kind != "same" and row.right is not None]


def _marked(lines: Sequence[str], differing: Sequence[int]) -> Markup:
    parts = []
    for number, line in enumerate(_snippet(lines)):
        tag = Markup(" class=x") if number in differing else Markup("")
        parts.append(Markup("<span{}>{}\n</span>").format(tag, html(line)))
    return Markup("").join(parts)


def _targets(
    review: Review, texts: Mapping[str, FileTexts], anchors: _Anchors
) -> Iterator[dict[str, Any]]:
    own = review["own"]
    listed = {target["path"]: target for target in review["targets"]}
    base, version = review["base"]["release"], review["release"]["version"]
    for path in dict.fromkeys((*listed, *texts)):
        anchor = anchors.give("target", path)
        file = texts.get(path)
        target: dict[str, Any] = {
            "path": path,
            "anchor": anchor,
            "figures": None if own else listed.get(path),
            "conflicts": file is not None and file.candidate is None and not own,
            "seams": None,
            "drift": None,
        }
        if file is not None:
            if own or file.candidate is None:
                seams = (file.base, file.overlaid, base, f"{base}, overlaid")
            else:
                seams = (file.release, file.candidate, version, f"{version}, candidate")
            target["seams"] = _diff(*seams, anchor=anchor)
            target["drift"] = None if own else _diff(file.base, file.release, base, version)
        yield target


def _diff(left: str, right: str, before: str, after: str, anchor: str = "") -> dict[str, Any]:
    """Two texts side by side; with an anchor, the lines left out can be unfolded."""
    after_lines = lines_of(right)
    hunks = compare(lines_of(left), after_lines)
    lines = (highlighted(left), highlighted(right))
    return {
        "before": before,
        "after": after,
        "same": not any(hunk.rows for hunk in hunks),
        "hunks": [
            {
                "anchor": f"{anchor}-hunk-{number}" if anchor and hunk.rows else "",
                "gap": _gap(hunk),
                # Without highlighting, to keep the page light.
                "unfolded": visible("\n".join(after_lines[i] for i in hunk.right))
                if anchor
                else None,
                "inside": _inside(after_lines, hunk),
                "rows": Markup("\n").join(_row(row, lines) for row in hunk.rows),
            }
            for number, hunk in enumerate(hunks, 1)
        ],
    }


def _gap(hunk: Hunk) -> str:
    if not hunk.left:
        return ""
    first, last = (f"{lines.start + 1:,}" for lines in (hunk.left, hunk.right))
    where = first if first == last else f"{first} and {last}"
    return f"{phrases.counted(len(hunk.left), 'unchanged line')} from {where}"


def _inside(lines: Sequence[str], hunk: Hunk) -> str:
    """The function or class in which a hunk begins."""
    if not hunk.rows or hunk.rows[0].right is None:
        return ""
    first = next((line for line in lines[hunk.rows[0].right :] if line.strip()), "")
    depth = len(first) - len(first.lstrip())
    for line in reversed(lines[: hunk.rows[0].right]):
        match = _HEADING.match(line)
        if match and len(match[1]) < depth:
            return f"{match[2]} {match[3]}"
    return ""


def _row(row: Row, lines: tuple[Sequence[Line], Sequence[Line]], numbers: bool = True) -> Markup:
    """A row of a table; its cells need no end tags, which halves the markup."""
    cells = []
    for index, spans, side in (
        (row.left, row.left_spans, lines[0]),
        (row.right, row.right_spans, lines[1]),
    ):
        code = Markup("") if index is None else html(side[index], spans)
        number = Markup("<td>{}").format("" if index is None else index + 1)
        cells.append(Markup("{}<td>{}").format(number if numbers else "", code))
    return Markup("<tr{}>{}{}").format(Markup(_ROWS[row.kind]), *cells)  # noqa: S704 (ours)
