"""The sentences on top of a run, which say whether to turn the overlay on."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from bench.reports.claims import Claims
from bench.reports.markdown import markdown
from bench.reports.page import page
from bench.reports.verdict import verdicts
from support import runs
from support.browser import PHONE, browser, opening


def sentence(run: dict[str, Any], row: str = "row") -> str:
    """The lines of a row: a heading, and one for each case."""
    lines = verdicts(run, Claims([run]))
    (begin,) = [n for n, line in enumerate(lines) if line.startswith(f"- **{row}**")]
    cases = takewhile(lambda line: line.startswith("  - "), lines[begin + 1 :])
    return "\n".join([lines[begin], *cases])


def equal(run: dict[str, Any]) -> None:
    """Make the plain case equal on both sides, but for noise."""
    for name, values in run["rows"]["row"]["cases"]["none"]["figures"].items():
        if values["ratios"]:
            values["overlaid"] = values["stock"]
            rounds = values["rounds"]
            rounds["overlaid"] = rounds["stock"][1:] + rounds["stock"][:1]
            values["ratios"] = {"overlaid": 1.0}
        assert name


def test_a_sentence_compares_each_kind_of_requests_in_steady_batches() -> None:
    run = runs.measured()
    equal(run)
    assert sentence(run) == (
        "- **row**, steady batches, 4 tokens, five rounds\n"
        "  - plain: no difference shown (between 0.978 and 1.02 times the tokens/s, 100.0 to 100.0 "
        "tokens/s, ITL 80.00 to 80.00 ms)\n"
        "  - presence: **3.8 times the tokens/s** (100.0 to 380.0 tokens/s, ITL 80.00 to 21.05 ms)"
    )
    text = markdown(run)
    assert text.startswith(
        "**Overlaid, beside stock:**\n\n- **row**, steady batches, 4 tokens, five rounds"
    )


def test_what_is_slower_is_called_worse() -> None:
    run = runs.measured()
    for values in run["rows"]["row"]["cases"]["presence"]["figures"].values():
        values["ratios"] = {side: 1 / ratio for side, ratio in values["ratios"].items()}
        rounds = values["rounds"]
        values["rounds"] = {"stock": rounds["overlaid"], "overlaid": rounds["stock"]}
    assert "presence: **0.263 times the tokens/s**, which is worse (" in sentence(run)


def test_slices_by_turns_say_more_than_whole_rounds() -> None:
    run = runs.measured()
    equal(run)
    slices = [[100.0, 120.0, 90.0]] * 5
    noisy = [[value * by for value in slices[0]] for by in (0.8, 1.2, 1.0, 0.9, 1.15)]
    slower = [[value / 2 for value in round_] for round_ in slices]
    cases = run["rows"]["row"]["cases"]
    cases["none"]["speeds"] = {"stock": slices, "overlaid": noisy}
    cases["presence"]["speeds"] = {"stock": slices, "overlaid": slower}
    said = sentence(run)
    assert "plain: no difference shown (" in said
    assert "times the steps/s, " in said
    assert (
        "presence: **0.5 times the steps/s**, which is worse (0.5 to 0.5, slices by turns, "
        "100.0 to 380.0 tokens/s" in said
    )


def drop_round(run: dict[str, Any]) -> None:
    for values in run["rows"]["row"]["cases"]["presence"]["figures"].values():
        for rounds in values["rounds"].values():
            rounds.pop()


def disturb(run: dict[str, Any]) -> None:
    run["rows"]["row"]["cases"]["presence"]["disturbances"]["stock"][0]["run delay"] = 0.1


def refuse(problem: str) -> Any:
    def change(run: dict[str, Any]) -> None:
        runs.refuse(run["rows"]["row"]["cases"]["presence"], "overlaid", problem)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop_round, "presence: not enough rounds for a claim (3.8 times the tokens/s, 100.0"),
        (disturb, "presence: too disturbed for a claim (3.8 times the tokens/s, 100.0 to"),
        (refuse("tokens of a and b differ: x"), "presence: refused (100.0 to 380.0"),
        (refuse("overlaid was not measured"), "presence: not measured ("),
    ],
)
def test_without_a_claim_the_sentence_says_why(change: Any, told: str) -> None:
    run = runs.measured()
    change(run)
    assert told in sentence(run)


def test_one_round_and_other_figures_are_in_words() -> None:
    run = runs.measured()
    row = run["rows"]["row"]
    row["rounds"] = 12
    for case in row["cases"].values():
        case["figures"] = {"step": case["figures"]["ITL p50"]}
    assert (
        "**row**, steady batches, 4 tokens, 12 rounds\n  - plain: **0.263 times the step**\n"
        in sentence(run)
    )
    row |= {"rounds": 1, "shape": "32 requests at a time"}
    assert sentence(run).startswith("- **row**, 4 tokens, one round\n")
    assert verdicts(runs.table(), Claims([])) == []
    row["sides"] = ["stock", "stock again"]
    assert verdicts(run, Claims([run])) == []


def serving() -> dict[str, Any]:
    """A run of servers, which has no batch and no prompt."""
    run = runs.measured()
    row = run["rows"].pop("row")
    for name in ("batch", "prompt", "output", "scheduling", "source"):
        del row[name]
    run["rows"] = {"vllm serve": row | {"shape": "4 requests", "model": "generated model"}}
    return run


def test_a_run_of_servers_has_a_page_with_its_verdict_and_colours(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(serving()), encoding="utf-8")
    with browser() as started, opening(started) as show:
        opened = show(file, PHONE, "light").page
        assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert "vllm serve, five rounds\nplain: 3.8 times" in opened.inner_text("li >> nth=0")
        colour = "cell => getComputedStyle(cell).color"
        assert opened.eval_on_selector("td strong", colour) == "rgb(17, 99, 41)"
