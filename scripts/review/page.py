"""The page of a review: what its template shows, made ready."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pages
from markupsafe import Markup

from review import words
from review.colours import Line, coloured, html, seen
from review.sides import Hunk, Row, Sides, Texts, compare, lines_of
from review.words import Found

TEMPLATE = "page.html.j2"
#: Opens what is folded around the target of a link. Without it all can be opened by hand.
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
#: How each verdict and fate is coloured.
_MOODS = {
    **dict.fromkeys(("clean", "applies", "same"), "good"),
    **dict.fromkeys(("needs eyes", "moved", "obsolete", "adopted", "body"), "eyes"),
    **dict.fromkeys(("conflicts", "gone", "signature"), "bad"),
}
_ROWS = {"same": "", "changed": " class=x", "gone": " class=g", "new": " class=n"}
_HEADING = re.compile(r"(\s*)((?:async )?def|class)\s+(\w+)")


def render(review: Found, texts: Mapping[str, Texts]) -> str:
    """The review as one HTML page that asks for nothing else.

    Args:
        review: what ``review.json`` holds.
        texts: the texts of each file that the patches change, by its path.
    """
    environment = pages.environment(Path(__file__).parent)
    environment.filters["mood"] = lambda said: _MOODS.get(said, "")
    anchors = _Anchors()
    targets = list(_targets(review, texts, anchors))
    view = {
        "review": review,
        "title": words.title(review),
        "verdict": words.verdict(review),
        "counted": words.counted,
        "fates": words.FATES,
        "summary": words.patches(review),
        "patches": _patches(review, {each["path"]: each["anchor"] for each in targets}, anchors),
        "changed": [_name(name, anchors) for name in words.changed(review)],
        "unchanged": [_name(name, anchors) for name in words.unchanged(review)],
        "targets": targets,
        "candidate": None if review["own"] else review.get("candidate"),
        "rebase": re.sub(r"^make review\b", "make rebase", review["command"]),
        "script": Markup(SCRIPT),  # noqa: S704 (ours)
        "script_digest": b64encode(sha256(SCRIPT.encode()).digest()).decode(),
    }
    return environment.get_template(TEMPLATE).render(view)


class _Anchors:
    """The ids of a page, each given once."""

    def __init__(self) -> None:
        self._given: set[str] = {"patches", "warnings", "names", "files", "candidate", "how"}

    def give(self, kind: str, name: str) -> str:
        """An id for something of that name, made of characters that need no quoting."""
        plain = f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-') or 'x'}"
        free, number = plain, 1
        while free in self._given:
            number += 1
            free = f"{plain}-again-{number}"
        self._given.add(free)
        return free


def _name(name: Found, anchors: _Anchors) -> dict[str, Any]:
    return {**name, "anchor": anchors.give("name", name["name"])}


def _patches(review: Found, targets: Mapping[str, str], anchors: _Anchors) -> list[dict[str, Any]]:
    found = []
    for patch in review["patches"]:
        number = re.match(r"\d+", patch["name"])
        anchor = anchors.give("patch", number[0] if number else patch["name"])
        files = []
        for at, file in enumerate(patch["files"], 1):
            hunks = [
                {**hunk, **_texts_of(hunk), "anchor": f"{anchor}-file-{at}-hunk-{number}"}
                for number, hunk in enumerate(file["hunks"], 1)
            ]
            anchor_of_file = f"{anchor}-file-{at}"
            target = targets.get(file["path"])
            files.append({**file, "hunks": hunks, "anchor": anchor_of_file, "target": target})
        found.append({**patch, "files": files, "anchor": anchor})
    return found


def _texts_of(hunk: Found) -> dict[str, Any]:
    """A hunk's texts as HTML: three beside one another for a conflict, otherwise two."""
    texts = [list(hunk[side]) for side in ("base", "ours", "theirs")]
    if hunk["verdict"] == "conflicts" or hunk["theirs"]:
        base, ours, theirs = texts
        return {
            "three": [
                _marked(base, [*_differing(ours, base), *_differing(theirs, base)]),
                _marked(ours, _differing(base, ours)),
                _marked(theirs, _differing(base, theirs)),
            ]
        }
    sides = compare(texts[0], texts[1])
    colours = (_snippet(texts[0]), _snippet(texts[1]))
    rows = (_row(row, sides, colours, numbers=False) for hunk in sides.hunks for row in hunk.rows)
    return {"three": None, "rows": Markup("").join(rows)}


def _snippet(lines: Sequence[str]) -> tuple[Line, ...]:
    """Lines taken out of a file, in colours; indentation does not matter to the lexer."""
    found = coloured("\n".join(lines))
    return found + ((),) * (len(lines) - len(found))


def _differing(one: Sequence[str], other: Sequence[str]) -> list[int]:
    """The lines of ``other`` that are not in their place in ``one``."""
    rows = (row for hunk in compare(one, other).hunks for row in hunk.rows)
    return [row.right for row in rows if row.kind != "same" and row.right is not None]


def _marked(lines: Sequence[str], differing: Sequence[int]) -> Markup:
    marked = set(differing)
    parts = []
    for at, line in enumerate(_snippet(lines)):
        tag = Markup(" class=x") if at in marked else Markup("")
        parts.append(Markup("<span{}>{}\n</span>").format(tag, html(line)))
    return Markup("").join(parts)


def _targets(
    review: Found, texts: Mapping[str, Texts], anchors: _Anchors
) -> Iterator[dict[str, Any]]:
    own = review["own"]
    listed = {target["path"]: target for target in review["targets"]}
    base, version = review["base"]["release"], review["release"]["version"]
    for path in dict.fromkeys((*listed, *texts)):
        anchor = anchors.give("target", path)
        found = texts.get(path)
        seams: tuple[str, str, str, str] | None = None
        if found:
            if own or found.candidate is None:
                seams = (found.base, found.overlaid, base, f"{base}, overlaid")
            else:
                seams = (found.release, found.candidate, version, f"{version}, candidate")
        yield {
            "path": path,
            "anchor": anchor,
            "figures": None if own else listed.get(path),
            "conflicts": bool(found and found.candidate is None and not own),
            "seams": _diff(*seams, anchor=anchor) if seams else None,
            "drift": _diff(found.base, found.release, base, version) if found and not own else None,
        }


def _diff(left: str, right: str, before: str, after: str, anchor: str = "") -> dict[str, Any]:
    """Two texts side by side; with an anchor, what is left out can be unfolded."""
    sides = compare(lines_of(left), lines_of(right))
    colours = (coloured(left), coloured(right))
    return {
        "before": before,
        "after": after,
        "same": sides.same,
        "hunks": [
            {
                "anchor": f"{anchor}-hunk-{at}" if anchor and hunk.rows else "",
                "gap": _gap(hunk),
                "unfolded": _left_out(sides, hunk) if anchor else None,
                "inside": _inside(sides, hunk),
                "rows": Markup("\n").join(_row(row, sides, colours) for row in hunk.rows),
            }
            for at, hunk in enumerate(sides.hunks, 1)
        ],
    }


def _left_out(sides: Sides, hunk: Hunk) -> str:
    """The lines that are left out before a hunk, without colours, to keep the page light."""
    return seen("\n".join(sides.right[hunk.right.start : hunk.right.stop]))


def _gap(hunk: Hunk) -> str:
    if not hunk.left:
        return ""
    first, last = (f"{each.start + 1:,}" for each in (hunk.left, hunk.right))
    where = first if first == last else f"{first} and {last}"
    return f"{words.counted(len(hunk.left), 'unchanged line')} from {where}"


def _inside(sides: Sides, hunk: Hunk) -> str:
    """The function or class that a hunk begins in, as its nearest heading."""
    if not hunk.rows or hunk.rows[0].right is None:
        return ""
    lines = sides.right
    first = next((line for line in lines[hunk.rows[0].right :] if line.strip()), "")
    depth = len(first) - len(first.lstrip())
    for line in reversed(lines[: hunk.rows[0].right]):
        match = _HEADING.match(line)
        if match and len(match[1]) < depth:
            return f"{match[2]} {match[3]}"
    return ""


def _row(
    row: Row, sides: Sides, colours: tuple[Sequence[Line], Sequence[Line]], numbers: bool = True
) -> Markup:
    """A row of a table; its cells need no end tags, which halves the markup."""
    cells = []
    for at, spans, lines in (
        (row.left, row.left_spans, colours[0]),
        (row.right, row.right_spans, colours[1]),
    ):
        code = Markup("") if at is None else html(lines[at], spans)
        number = Markup("<td>{}").format("" if at is None else at + 1) if numbers else Markup("")
        cells.append(Markup("{}<td>{}").format(number, code))
    return Markup("<tr{}>{}{}").format(Markup(_ROWS[row.kind]), *cells)  # noqa: S704 (ours)
