"""A small series, the small release that it is for, and releases with one change each.

The changes are of kinds that no real release has made yet. Other tests use real releases.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from overlay import pin
from overlay.patches import Series, parse
from overlay.source import Overlay
from series import catalogue
from series.checksums import expected_pin
from series.commits import bare
from series.upstream import Upstream

from support import mini

PATH = "vllm/v1/runner.py"
OTHER = "vllm/v1/other.py"
RUNNER = '''"""Runs."""

LIMIT = 8


class Runner:
    """Holds rows."""

    def __init__(self):
        self.rows = []

    def prepare(self, rows):
        self.rows = list(rows)
        return len(self.rows)

    def sample(self, logits):
        self.prepare(logits)
        chosen = max(logits)
        self.wait()
        return chosen

    def wait(self):
        return None

    def drop(self, row):
        self.rows.remove(row)

    def finish(self):
        total = sum(self.rows)
        return total
'''
#: Our module, which the patches call, and which calls upstream.
NOTES = '''"""Notes."""

from vllm.v1.runner import LIMIT, Runner


def note(runner: Runner, chosen: int) -> int:
    """Prepare again, and say how many are left."""
    return LIMIT - runner.prepare([chosen]) - len(runner.rows)


def done(runner: Runner) -> None:
    """Nothing."""
'''
BASE = {PATH: RUNNER, OTHER: '"""Nothing of ours."""\n'}

#: The text that each patch replaces, and its replacement; the third changes the first's line.
EDITS = (
    ("        self.wait()\n", "        readiness.note(self)\n"),
    ("        return total\n", "        readiness.done(self)\n        return total\n"),
    ("readiness.note(self)", "readiness.note(self, chosen)"),
)


def upstream(texts: Mapping[str, str]) -> Upstream:
    """A release that consists of these files."""
    return Upstream(tuple(sorted(texts)), lambda path: texts[path].encode())


def replaced(text: str, *edits: tuple[str, str]) -> str:
    """``text`` with each edit made; its old text must occur once."""
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def patch_files(
    edits: tuple[tuple[str, str], ...] = EDITS,
    text: str = RUNNER,
    path: str = PATH,
) -> dict[str, bytes]:
    """The files of a patch for each edit, by name."""
    files = {}
    for number, edit in enumerate(edits, 1):
        changed = replaced(text, edit)
        header = mini.HEADER.replace("Description: text", f"Description: Edit {number}")
        diff = mini.unified(path, text.encode(), changed.encode())
        data = b"".join(bare(diff, {path: changed.encode()}.__getitem__))
        files[f"{number:04}-edit-{number}.patch"] = header.encode() + b"\n" + data
        text = changed
    return files


def series(
    edits: tuple[tuple[str, str], ...] = EDITS, text: str = RUNNER, path: str = PATH
) -> Series:
    """A patch for each edit."""
    return Series([parse(name, data) for name, data in patch_files(edits, text, path).items()])


class Change(NamedTuple):
    """A release with one change, and the verdicts on the patches."""

    edit: Callable[[str], str]
    verdicts: tuple[str, str, str]


def _move(text: str) -> str:
    """Move ``finish``, which the second patch changes, to the beginning of the class."""
    head, finish, tail = text.partition("    def finish")
    rest, block = head.rstrip("\n") + "\n", finish + tail
    return replaced(rest, ("    def __init__", f"{block}\n    def __init__"))


def _move_call(text: str) -> str:
    """Move the line that the first patch removes into another function."""
    return replaced(
        text,
        ("        self.wait()\n", ""),
        ("        self.rows.remove(row)\n", "        self.rows.remove(row)\n        self.wait()\n"),
    )


SAME = ("applies",) * 3
CHANGES: Mapping[str, Change] = {
    "nothing": Change(lambda text: text, SAME),
    "a line above": Change(
        lambda text: replaced(text, ("LIMIT = 8\n", "LIMIT = 8\nMORE = 9\n")), ("moved",) * 3
    ),
    "a line below": Change(lambda text: text + "\n\nMORE = 9\n", SAME),
    "a renamed function": Change(lambda text: replaced(text, ("def sample(", "def draw(")), SAME),
    "a new parameter": Change(
        lambda text: replaced(text, ("sample(self, logits)", "sample(self, logits, top=1)")), SAME
    ),
    "a moved block": Change(_move, ("moved", "conflicts", "moved")),
    "a deleted call": Change(
        lambda text: replaced(text, ("        self.wait()\n", "")),
        ("conflicts", "moved", "conflicts"),
    ),
    "a moved call": Change(_move_call, ("conflicts", "applies", "conflicts")),
    "our own change": Change(
        lambda text: replaced(text, EDITS[0]), ("obsolete", "applies", "applies")
    ),
    "a change next to a seam": Change(
        lambda text: replaced(text, ("chosen = max(logits)", "chosen = min(logits)")),
        ("conflicts", "applies", "conflicts"),
    ),
    "a change two lines from a seam": Change(
        lambda text: replaced(text, ("self.prepare(logits)", "self.prepare(logits + [])")), SAME
    ),
    "a change inside a seam": Change(
        lambda text: replaced(text, ("        self.wait()\n", "        self.wait(1)\n")),
        ("conflicts", "applies", "conflicts"),
    ),
    "the function is gone": Change(
        lambda text: text[: text.index("    def finish")].rstrip() + "\n",
        ("applies", "conflicts", "applies"),
    ),
}


def checkout(
    root: Path,
    edits: tuple[tuple[str, str], ...] = EDITS,
    base: Mapping[str, str] = BASE,
    path: str = PATH,
) -> Overlay:
    """Write an overlay with that series for a file of ``base`` into ``root`` and read it."""
    patches = patch_files(edits, base[path], path)
    files = {
        "patches/series": "".join(f"{name}\n" for name in patches).encode(),
        **{f"patches/{name}": data for name, data in patches.items()},
        "vendor_overlay/vllm/v1/readiness/version.py": b'__version__ = "0.0.1"\n',
        "vendor_overlay/vllm/v1/readiness/notes.py": NOTES.encode(),
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    empty = pin.Pin("0.22.0", "0.0.1", {"vllm-0.22.0-py3-none-any.whl": "0" * 64}, {}, {})
    whole = Series.load(root / "patches")
    expected = expected_pin(root, empty, whole, lambda path: base[path].encode())
    (root / pin.NAME).write_text(expected.dumps())
    page = catalogue.page(Series.load(root / "patches"))
    (root / "patches" / catalogue.NAME).write_bytes(page)
    return Overlay.load(root)


def state_facts(root: Path) -> None:
    """Write the facts about upstream of the checkout in ``root``, which knows no errata."""
    facts = 'release = "0.22.0"\nread = "0.33.0"\n\n[errata]\n\n'
    (root / "patches" / "upstream.toml").write_text(facts)
