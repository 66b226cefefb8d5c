"""Generate docs/measurements.md and README's table of gains from the committed runs.

    PYTHONPATH=scripts python -m bench.measurements

The text is scripts/bench/measurements.md. A line `<!-- table: RUNS | SIDES | FIGURES -->` in it is
replaced by a table of these runs of scripts/bench/runs, a row for each case, and `<!-- slower -->`
by the figures in which the overlay is worse. Names are separated by commas, or by semicolons where
a name holds a comma. build/measurements.md gets all tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from overlay import output

from bench import headline
from bench.errors import Failure
from bench.harness.installations import ROOT
from bench.markdown import markdown, number, pipes, ratio
from bench.run import Comparison, Group, Run, figures, load, loss, replace

TEMPLATE = ROOT / "scripts" / "bench" / "measurements.md"
RUNS = ROOT / "scripts" / "bench" / "runs"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "measurements.md"
FULL = ROOT / "build" / "measurements.md"
#: Figures that can be listed as slower.
DECIDING = re.compile(
    r"(tokens/s|requests/s|TPOT p\d+|ITL p\d+|TTFT p\d+"
    r"|(execute_model|_update_states|_prepare_inputs|_build_attention_metadata|sample_tokens"
    r"|schedule|update_from_output) p50(, \w+)?)"
)
#: A smaller difference without a claim is not listed.
EVEN = 0.03
_MARK = re.compile(r"^<!-- (slower|table: ([^|\n]+) \| ([^|\n]+) \| ([^|\n]+)) -->$", re.MULTILINE)


class Page:
    """The runs of a page.

    Args:
        folder: directory of the run files.

    Raises:
        Failure: a run is not fit to be published.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.json.gz"))
        self.runs = {file.name.partition(".")[0]: _publishable(file) for file in files}
        self._claims = {
            name: sum(
                DECIDING.fullmatch(each) is not None
                for of in run.groups().values()
                for each in figures(of)
            )
            for name, run in self.runs.items()
        }

    def text(self, template: str) -> str:
        """Return the page of a template.

        Raises:
            Failure: the template names a run that is not in the folder.
        """

        def replaced(mark: re.Match[str]) -> str:
            if mark[1] == "slower":
                return "\n".join(self.slower())
            runs, sides, names = (_words(mark[n]) for n in (2, 3, 4))
            if wrong := ", ".join(sorted({*runs} - self.runs.keys())):
                raise Failure(f"the template names runs that are not in the folder: {wrong}")
            return "\n".join(self.table(runs, sides, names))

        return _MARK.sub(replaced, template)

    def table(self, runs: Sequence[str], pairs: Sequence[str], names: Sequence[str]) -> list[str]:
        """Return the lines of a table, the worst row of the first figure first.

        Args:
            runs: their names.
            pairs: of sides, as "A/B".
            names: of figures; of the first one, both sides are shown.
        """
        rows = list[tuple[float, list[str]]]()
        for run in runs:
            for group in self.runs[run].groups():
                engine, case, sides = group
                if "/".join(sides) not in pairs:
                    continue
                first, *others = (self.compare(run, group, name) for name in names)
                about = [_link(run), engine] * (len(runs) > 1) + [case]
                about += ["/".join(sides)] * (len(pairs) > 1)
                shown = [number(first.first), number(first.second), ratio(first) + _between(first)]
                worst = loss(names[0], first.ratio) if first.ratio else 0.0
                rows.append((worst, [*about, *shown, *map(ratio, others)]))
        rows.sort(key=lambda row: row[0], reverse=True)
        head = ["run", "engine"] * (len(runs) > 1) + ["case"] + ["sides"] * (len(pairs) > 1)
        aligned = "l" * len(head) + "r" * (2 + len(names))
        one, other = pairs[0].split("/") if len(pairs) == 1 else ("first", "second")
        head += [f"{names[0]}: {one}", other, "ratio", *names[1:]]
        return pipes(head, [cells for _, cells in rows], aligned)

    def compare(self, name: str, group: Group, figure: str) -> Comparison:
        """Compare the sides of a group.

        The level is corrected for all ratios of its run that can be listed as slower.
        """
        return self.runs[name].compare(group, figure, max(self._claims[name], 1))

    def slower(self) -> Iterator[str]:
        """Yield the lines of the table of losses, worst first, and how many have a mark.

        A loss is a deciding figure in which the overlay is worse than another side.
        """
        marked, rows = 0, list[tuple[float, list[str]]]()
        for name, run in self.runs.items():
            for group, of in run.groups().items():
                _, case, (first, second) = group
                if first != "overlaid" or second.startswith("overlaid"):
                    continue
                for figure in filter(DECIDING.fullmatch, figures(of)):
                    compared = self.compare(name, group, figure)
                    worse = loss(figure, compared.ratio) if compared.ratio else 0.0
                    if compared.mark:
                        marked += worse > 1 + EVEN
                    elif worse > 1:
                        shown = [number(compared.first), number(compared.second), ratio(compared)]
                        cells = [_link(name), case, figure, f"{first}/{second}", *shown]
                        rows.append((worse, cells))
        rows.sort(key=lambda row: row[0], reverse=True)
        head = ["run", "case", "figure", "sides", "first", "second", "ratio"]
        yield from pipes(head, [cells for _, cells in rows], "llllrrr")
        yield from ("", f"{marked} more figures are worse by 3% or more, and are no claims.")


def _publishable(file: Path) -> Run:
    """Read a run that is whole, and of a commit.

    Raises:
        Failure: it was cut off, failed in part, or files differed from the commit.
    """
    run = load(file)
    if not run.complete or run.problems:
        raise Failure(f"{file} was cut off, or failed in part; measure it again or delete it")
    if not run.commit or run.commit.endswith("-dirty"):
        raise Failure(f"{file} is of no commit ({run.commit}); commit, and measure it again")
    return run


def _words(text: str) -> list[str]:
    separator = ";" if ";" in text else ","  # a figure's name may hold a comma
    return [word.strip() for word in text.split(separator) if word.strip()]


def _link(name: str) -> str:
    return f"[{name}](../scripts/bench/runs/{name}.json.gz)"


def _between(compared: Comparison) -> str:
    if compared.low is None or compared.high is None:
        return ""
    return f" ({number(compared.low, ratio=True)} to {number(compared.high, ratio=True)})"


def pages() -> dict[Path, str]:
    """Return README, the summary and all tables, made of the committed runs.

    Raises:
        Failure: see :class:`Page`, and :meth:`Page.text`.
    """
    page = Page(RUNS)
    traffic = (
        (group, page.compare(name, group, "tokens/s"))
        for name, run in page.runs.items()
        if run.load in ("traffic", "streams") and "VLLM_READINESS" not in run.environment
        for group in run.groups()
    )
    return {
        README: headline.update(README.read_text(encoding="utf-8"), traffic),
        PAGE: page.text(TEMPLATE.read_text(encoding="utf-8")),
        FULL: "\n".join(f"## {name}\n\n{markdown(run)}" for name, run in page.runs.items()),
    }


def main(argv: Sequence[str]) -> int:
    """Write the pages."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    try:
        for path, text in pages().items():
            path.parent.mkdir(exist_ok=True)
            replace(path, text.encode())
    except (Failure, OSError) as error:
        print(f"measurements: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("measurements", main))
