"""README's table of gains, of comparisons that are made up."""

from bench import headline
from bench.run import Comparison, Group

USUAL, FULL = "0.5B, piecewise", "0.5B, full"
THINKING = f"{USUAL}, thinking budget configured"
GAIN, LOSS, NOISE, FEW = (
    Comparison(2.0, 1.0, 1.3339, 1.1, 1.5, 5),
    Comparison(1.0, 2.0, 0.5, 0.4, 0.6, 5),
    Comparison(2.0, 1.0, 2.0, 0.9, 3.0, 5, "~"),
    Comparison(2.0, 1.0, 2.0, None, None, 4, "?"),
)
SHOWN = "**1.33** (1.10 to 1.50)"


def of(
    engine: str, case: str, compared: Comparison, side: str = "stock"
) -> tuple[Group, Comparison]:
    return (engine, case, ("overlaid", side)), compared


def test_a_cell_shows_each_gain_and_names_every_other_place() -> None:
    readme = "# Title\n\n| requests with | old |\n| --- | --- |\n| a | b |\n\nText.\n\nMore.\n"
    updated = headline.update(
        readme,
        [
            *(of(USUAL, "plain, 128", one) for one in (GAIN, GAIN)),
            *(of(USUAL, f"plain, {n}", NOISE) for n in (8, 1)),
            *(of("7B, piecewise", "plain, 64", LOSS), of(FULL, "plain, 128", GAIN)),
            *(of(USUAL, "plain, 128", one, "mrv2") for one in (NOISE, GAIN)),
            *(of(FULL, "plain, 128", NOISE, "mrv2"), of(USUAL, "plain, 32", GAIN, "mrv2")),
            *(of(USUAL, "presence, 128", FEW), of(USUAL, "one-presence, 128", NOISE)),
            *(of(THINKING, "mixed, 128", GAIN), of(THINKING, "thinking, 128", GAIN)),
            *(of(FULL, "seeded, 128", NOISE), of("7B, full", "bad-words, 64", GAIN)),
            of(USUAL, "mixed, 128", GAIN, "again"),
        ],
    )
    assert updated.startswith("# Title\n\n| requests with | tokens/s, of stock's | ")
    assert updated.endswith(" |\n\nText.\n\nMore.\n")
    rows = [line.strip("| ").split(" | ") for line in updated.splitlines() if line[:1] == "|"]
    cells = {row: rest for row, *rest in rows}
    assert cells["nothing special: temperature 1"] == [
        f"yes, {SHOWN}; full graphs {SHOWN}. 1, 8 at a time, 7B: no gain shown",
        f"{SHOWN} in 1 of 2 runs; 32 at a time {SHOWN}. Full graphs: no gain shown",
    ]
    assert cells["a presence penalty"] == ["measure"] * 2
    assert cells["a presence penalty, one of 128"][0] == "no gain shown"
    assert cells["a thinking budget"] == [f"yes, {SHOWN}", "V2 refuses it"]
    assert cells["mixed sampling: penalties, top-p, seeds, logprobs"] == ["measure"] * 2
    assert cells["a seed each"][0] == "full graphs: no gain shown"
    assert cells["bad words"][0] == f"7B {SHOWN}"
