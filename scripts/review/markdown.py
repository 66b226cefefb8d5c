"""A review as Markdown, for a pull request or the summary of a CI run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from review import words
from review.words import Found

#: GitHub refuses a comment of more than 65,536 characters.
LIMIT = 60_000
#: A single text longer than this is cut.
_LONGEST = 600
#: Users of a name that are listed.
_USERS = 3

_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]|^\d+(?=[.)])")


def render(review: Found) -> str:
    """The review as Markdown, at most :data:`LIMIT` characters; what is left out is counted."""
    release = review["release"]
    parts = [
        f"# {escape(words.title(review))}",
        f"**{escape(words.verdict(review))}** {escape(words.patches(review))}",
        f"{code(release['wheel'])}, SHA-256 {code(release['sha256'])}, "
        f"proven by {escape(release['proof'])}.",
    ]
    room = LIMIT - sum(len(part) + 2 for part in parts)
    for heading, columns, lines in _sections(review):
        # Each section may fill half of what is left, so that the last is not squeezed out.
        part = _section(heading, columns, lines, room // 2)
        parts += [part] if part else []
        room -= len(part) + 2
    parts.append(f"Made by {code(review['command'])} on {escape(review['date'])}.")
    return "\n\n".join(parts) + "\n"


def _sections(review: Found) -> Iterable[tuple[str, Sequence[str], list[str]]]:
    """Headings, the columns of their tables (none: a list), and the lines."""
    yield (
        "",
        ("patch", "verdict", "why"),
        [
            _line(code(patch["name"], True), escape(patch["verdict"]), escape(patch["because"]))
            for patch in review["patches"]
        ],
    )
    if review["warnings"]:
        warnings = [f"- {escape(warning)}" for warning in review["warnings"]]
        yield words.counted(len(warnings), "warning"), (), warnings
    if review["names"]:
        names = [_name(name) for name in words.changed(review)]
        total = words.counted(len(review["names"]), "name")
        heading = f"Names that changed: {len(names):,} of {total} that the overlay relies on"
        yield heading, ("name", "fate", "what", "users"), names
    if review["targets"] and not review["own"]:
        lines = [
            _line(
                code(target["path"], True),
                f"{target['added']:,}",
                f"{target['removed']:,}",
                f"{len(target['functions']):,}",
            )
            for target in review["targets"]
        ]
        columns = ("file", "lines added", "lines removed", "functions touched")
        yield "Upstream's own drift", columns, lines


def _name(name: Found) -> str:
    fate = str(words.FATES.get(name["fate"], name["fate"]))
    if not name["certain"]:
        fate += " (found by its name alone)"
    users = [code(user, True) for user in name["users"][:_USERS]]
    if more := len(name["users"]) - _USERS:
        users += [f"and {more:,} more"] if more > 0 else []
    detail = escape(name["detail"])
    return _line(code(name["name"], True), escape(fate), detail, ", ".join(users))


def _section(heading: str, columns: Sequence[str], lines: Sequence[str], room: int) -> str:
    head = [f"## {heading}", ""] if heading else []
    if columns and lines:
        head += [_line(*columns), _line(*("---" for _ in columns))]
    kept: list[str] = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    left = len(lines) - len(kept)
    foot = ["", f"{left:,} more are in the page and in review.json."] if left else []
    return "\n".join([*head, *kept, *foot]).rstrip()


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line, and that mentions and links nobody."""
    plain = _cut(text)
    found = _MARKUP.sub(_escaped, plain)
    # GitHub makes @name, #1 and addresses into links, whatever is escaped before them.
    found = re.sub(r"@(?=\w)", "@<!-- -->", found)
    return re.sub(r"\\#(?=\d)", r"\\#<!-- -->", found)


def _escaped(match: re.Match[str]) -> str:
    # A number that would begin a list is escaped behind itself.
    return match[0] + "\\" if match[0].isdigit() else "\\" + match[0]


def code(text: str, in_table: bool = False) -> str:
    """Text as code on one line; in a table its bars are escaped as tables want it."""
    plain = _cut(text)
    longest = max((len(run) for run in re.findall("`+", plain)), default=0)
    fence = "`" * (longest + 1)
    padded = f" {plain} " if plain.startswith("`") or plain.endswith("`") else plain
    found = f"{fence}{padded or ' '}{fence}"
    return found.replace("|", "\\|") if in_table else found


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
