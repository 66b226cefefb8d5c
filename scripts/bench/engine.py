"""The engine on stock vLLM beside the engine on the overlaid one, in one run.

    PYTHON scripts/bench/engine.py --site SITE --out DIR [--rounds N] [--rows NAME...]

SITE is a pristine installation, and stays so: a view of its vllm package, hard links where
the file system allows, is what gets the overlay. Each engine runs in a process of its own,
the two sides by turns. DIR gets the table as engine.md and everything as engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(ROOT / "scripts")

from bench import report  # noqa: E402
from bench.rows import ROWS  # noqa: E402
from bench.sides import Failure, Sides, in_turn, work_beside  # noqa: E402

#: One process, so that the step's functions can be timed from inside; the sampler that needs
#: no compiler on the machine.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Run:
    """The installations, the children and what they found so far."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.work = work
        self.started = time.monotonic()
        self.children: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.sides = Sides(args.site, work, args.python)
        for side, digest in self.sides.digests.items():
            self.say(f"{side}: digest {digest[:12]}, proven by checksum")

    def measure(self) -> None:
        """Every row, round and side; a child that fails leaves an error behind."""
        for row in self.args.rows:
            for turn in range(1, self.args.rounds + 1):
                for side in in_turn(turn - 1):
                    try:
                        child = self._child(row, turn, side)
                    except Failure as error:
                        self.errors.append(str(error))
                        self.say(str(error))
                        continue
                    self.children.append(child)
                    speeds = [
                        f"{case} {found['figures']['tokens/s']:,.0f} tok/s"
                        for case, found in child["cases"].items()
                    ]
                    self.say(f"{row} round {turn} {side}: {', '.join(speeds)}")
                    self.write()

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def write(self) -> str:
        """Write what there is so far; the table."""
        first = self.children[0]
        found = report.summary(self.children)
        whole: dict[str, Any] = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.now(timezone.utc).date().isoformat(),
            **{key: first[key] for key in ("device", "torch", "vllm")},
            "digest": self.sides.digests["overlaid"],
            "environment": ENVIRONMENT
            | {name: v for name, v in os.environ.items() if name.startswith("VLLM_READINESS")},
            "shapes": {name: self._shape(name) for name in found},
            "rows": found,
            "errors": self.errors,
            "children": [_without_streams(child) for child in self.children],
        }
        table = report.markdown(whole)
        (self.args.out / "engine.json").write_text(json.dumps(whole, indent=1))
        (self.args.out / "engine.md").write_text(table)
        return table

    def _shape(self, name: str) -> dict[str, Any]:
        row = ROWS[name].tiny() if self.args.tiny else ROWS[name]
        ours = [child for child in self.children if child["row"] == name]
        asynchronous = {child["async scheduling"] for child in ours}
        return {
            **{key: getattr(row, key) for key in ("batch", "prompt", "output", "runner")},
            "scheduling": "/".join("async" if on else "sync" for on in asynchronous),
            "rounds": max(child["round"] for child in ours),
        }

    def _child(self, row: str, turn: int, side: str) -> dict[str, Any]:
        """Measure one row on one side in a process of its own.

        Raises:
            Failure: it failed, took too long, or imported another vLLM than it should.
        """
        name = f"{row} round {turn} {side}"
        stem = self.work / f"{row}-{turn}-{side}"
        out, log = stem.with_suffix(".json"), stem.with_suffix(".log")
        command = [self.args.python, str(Path(__file__).resolve()), "child", row, str(out)]
        command += ["--tiny"] if self.args.tiny else []
        # Set whatever the model, for which vLLM would choose.
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(ROWS[row].runner - 1)}
        code = self.sides.run(side, command, log, self.args.timeout, ENVIRONMENT | runner)
        if code != 0:
            kept = shutil.copy(log, self.args.out)
            tail = [line[:300] for line in log.read_text(errors="replace").splitlines()[-40:]]
            raise Failure("\n".join([f"{name} failed ({code}; log: {kept}):", *tail]))
        child: dict[str, Any] = json.loads(out.read_text())
        self.sides.check_import(side, child["package"])
        return {**child, "side": side, "round": turn}


def _without_streams(child: Mapping[str, Any]) -> dict[str, Any]:
    """A child without the outputs themselves, which only the comparison needs."""
    cases = {
        name: {key: value for key, value in case.items() if key not in ("tokens", "logprobs")}
        for name, case in child["cases"].items()
    }
    return {**child, "cases": cases}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, required=True, help="a pristine installation")
    parser.add_argument("--out", type=Path, required=True, help="directory for the report")
    parser.add_argument("--rounds", type=int, default=2, help="of each row (%(default)s)")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--python", default=sys.executable, help="what runs the engines")
    parser.add_argument(
        "--work",
        type=Path,
        help="directory for the view, and for what the children write; kept. "
        "Without it a temporary one beside SITE, where links to it work",
    )
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for one child")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print the table; 0 if every child ran and stock and overlaid gave the same."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    args.out.mkdir(parents=True, exist_ok=True)
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work and Path(tempfile.mkdtemp(prefix="bench-", dir=args.work)).resolve()
    work = kept or work_beside(args.site)
    try:
        run = Run(args, work)
        run.measure()
        if run.children:
            print(f"\n{run.write()}", flush=True)
        found = report.summary(run.children)
        spoilt = any(case["problems"] for row in found.values() for case in row.values())
        return 1 if run.errors or spoilt else 0
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)


def child(argv: Sequence[str]) -> int:
    """Measure one row in this process."""
    from bench import measure

    parser = argparse.ArgumentParser(prog="engine.py child")
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    measure.main(ROWS[args.row].tiny() if args.tiny else ROWS[args.row], args.out)
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    raise SystemExit(child(arguments[1:]) if arguments[:1] == ["child"] else main(arguments))
