"""Tables in Markdown, read back."""

import re


def rows(text: str) -> list[list[str]]:
    """The cells of each row below the head of the only table; every row has as many."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in lines]
    assert len({len(row) for row in cells}) == 1
    return cells[2:]
