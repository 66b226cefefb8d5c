"""README's table to decide by, of comparisons that are made up."""

from bench import headline
from bench.headline import NO_GAIN, NOT_MEASURED, REFUSED
from bench.run import Comparison, Group

USUAL = "0.5B, piecewise"
THINKING = f"{USUAL}, thinking budget configured"
GAIN, LOSS, NOISE, FEW = (
    Comparison(2.0, 1.0, 1.3339, 1.1, 1.5, 5),
    Comparison(1.0, 2.0, 0.5, 0.4, 0.6, 5),
    Comparison(2.0, 1.0, 2.0, 0.9, 3.0, 5, "~"),
    Comparison(2.0, 1.0, 2.0, None, None, 4, "?"),
)
WIDE, NARROW = (
    Comparison(4.0, 1.0, 4.0, 1.1, 3.4, 5),
    Comparison(4.0, 1.0, 4.0, 1.1, 3.3, 5),
)
MIXED = "mixed: penalties, top-p, seeds, logprobs"
SHOWN, SLOWER = "**1.33** (1.10 to 1.50)", "**0.50** (0.40 to 0.60) slower"


def of(
    engine: str, case: str, compared: Comparison, side: str = "stock"
) -> tuple[Group, Comparison]:
    return (engine, case, ("overlaid", side)), compared


def test_a_cell_is_the_worst_claim_of_its_place_and_bold_if_narrow() -> None:
    readme = "# Title\n\n| requests with | old |\n| --- | --- |\n| a | b |\n\nText.\n\nMore.\n"
    updated = headline.update(
        readme,
        [
            *(of(USUAL, "plain, 128", one) for one in (GAIN, GAIN)),
            *(of(USUAL, "plain, 128", one, "mrv2") for one in (NOISE, GAIN)),
            *(of("7B, piecewise", "plain, 64", one) for one in (GAIN, LOSS)),
            *(of(USUAL, "presence, 128", one) for one in (FEW, NOISE)),
            of(USUAL, "presence, 128", GAIN, "0.26.0"),
            *(of("0.5B, full", "seeded, 128", GAIN), of(USUAL, "seeded, 8", GAIN)),
            *(of(THINKING, "mixed, 128", GAIN), of(THINKING, "thinking, 128", GAIN)),
            of("0.5B, 4 API servers", "logprobs, 128", GAIN),
            of("0.5B, 1 API server", "logprobs, 128", NARROW),
            of("0.5B, 1 API server", "mixed, 128", WIDE),
            of("hybrid, piecewise, thinking budget configured", "thinking-presence, 64", LOSS),
            of("hybrid, piecewise", "plain, 64", GAIN),
            of("hybrid, decodes", "plain, 64", NOISE),
            *(of(USUAL, "own traffic", GAIN), of(USUAL, "mixed, 128", GAIN, "overlaid=-fixes")),
        ],
    )
    assert updated.startswith("# Title\n\n| requests with | 0.5B, 128 at a time | ")
    assert updated.endswith(" |\n\nText.\n\nMore.\n")
    rows = [line.strip("| ").split(" | ") for line in updated.splitlines() if line[:1] == "|"]
    head, _, *of_rows = rows
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in of_rows}
    assert {
        (row, column): cell
        for row, of_row in cells.items()
        for column, cell in of_row.items()
        if cell not in (NOT_MEASURED, row)
    } == {
        ("nothing special: temperature 1", "0.5B, 128 at a time"): SHOWN,
        ("nothing special: temperature 1", "7B, 64"): SLOWER,
        ("nothing special: temperature 1", "over V2, 0.5B, 128"): f"{SHOWN} in 1 of 2 runs",
        ("nothing special: temperature 1", "Bamba (hybrid), 64"): SHOWN,
        ("a penalty", "0.5B, 128 at a time"): NO_GAIN,
        ("a penalty", "over 0.26.0, 0.5B, 128"): SHOWN,
        ("5 logprobs", "0.5B, 128, HTTP, four API servers"): SHOWN,
        ("5 logprobs", "0.5B, 128, HTTP, one API server"): "**4.00** (1.10 to 3.30)",
        (MIXED, "0.5B, 128, HTTP, one API server"): "4.00 (1.10 to 3.40)",
        ("a thinking budget", "0.5B, 128 at a time"): SHOWN,
        ("a thinking budget", "over V2, 0.5B, 128"): REFUSED,
        ("a penalty and a thinking budget", "Bamba (hybrid), 64"): SLOWER,
        ("a penalty and a thinking budget", "over V2, 0.5B, 128"): REFUSED,
    }
