"""Show runs as Markdown, and join runs of the same installations and device.

    PYTHONPATH=scripts python -m bench.report RUN.json... [--join OUT.json]

Run files may be compressed. With --join the slices of all runs are written to OUT.json as one run,
compressed if the name ends in ".gz", and shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.errors import Failure
from bench.harness import manifest
from bench.results.markdown import markdown
from bench.results.run_file import load, save


def joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one run with the slices of all.

    Raises:
        Failure: they have other installations or devices, or measure different things.
    """
    first, slices, base = runs[0], [], 0
    for one in runs:
        same = {**first["digests"], **one["digests"]} == {**one["digests"], **first["digests"]}
        if not same or one["machine"]["device"] != first["machine"]["device"]:
            raise Failure(f"{one['command']} has other installations, or another device")
        switches = [each.get("environment", {}).get("VLLM_READINESS") for each in (one, first)]
        if one["title"] != first["title"] or switches[0] != switches[1]:
            raise Failure(f"{one['command']} measures other slices, or with another switch")
        slices += [{**each, "round": base + each["round"]} for each in one["slices"]]
        base = max((each["round"] for each in slices), default=base)
    command, seconds = "; ".join(one["command"] for one in runs), sum(o["seconds"] for o in runs)
    digests = {name: each for one in runs for name, each in one["digests"].items()}
    return {
        **first,
        **{"command": command, "seconds": seconds, "digests": digests, "slices": slices},
        "complete": all(one["complete"] for one in runs),
        "manifest": manifest.joined([one.get("manifest") or {} for one in runs]),
        "problems": list(dict.fromkeys(text for one in runs for text in one["problems"])),
    }


def main(argv: Sequence[str]) -> int:
    """Print the Markdown of each run, or of all runs as one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run files")
    parser.add_argument("--join", type=Path, metavar="OUT", help="write all runs as one to OUT")
    args = parser.parse_args(argv)
    try:
        runs: list[dict[str, Any]] = [load(file) for file in args.runs]
        if args.join:
            runs = [joined(runs)]
            save(args.join, runs[0])
        for run in runs:
            print(markdown(run), end="")
            for text in manifest.differences(run) if run.get("manifest") else ():
                print(f"- **NOT AS DECIDED**: {text}")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
