"""Show the probe's records.

    python3 scripts/probe FILE [--last 30s] [--json] [--trace TRACE.json]
    python3 scripts/probe --compare FILE OTHER [--last 30s]

FILE is the value of VLLM_READINESS_PROBE when the engine ran, or the file of one of its
processes (FILE.rank0). Prints a table of p50, p90, p99 and maximum in milliseconds for each
process, and what each part has of a step; --compare shows the steps of two recordings beside
one another; --trace also writes a Chrome trace, for https://ui.perfetto.dev. Needs the standard
library only, and not vLLM.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

if not __package__:
    # Started by its directory: load that, and what it needs, as the packages that they are.
    from importlib.util import module_from_spec, spec_from_file_location

    for name in ("overlay", "probe"):
        origin = Path(__file__).resolve().parents[1] / name / "__init__.py"
        spec = spec_from_file_location(name, origin)
        assert spec
        assert spec.loader
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

from overlay import output
from overlay.output import escaped

from probe import compare, engines, records, table, trace_events


def main(argv: Sequence[str]) -> int:
    """Print the table; return 0, or 1 if there is nothing to read."""
    parser = argparse.ArgumentParser(prog="probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="the value of VLLM_READINESS_PROBE")
    parser.add_argument("--last", type=_seconds, help="only the newest stretch: 30s, 500ms, 2m")
    parser.add_argument("--json", action="store_true", help="the table for programs")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace for Perfetto")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar="FILE", help="the steps of two recordings"
    )
    args = parser.parse_args(argv)
    if (args.file is None) != bool(args.compare):
        parser.error("name one file, or two with --compare")
    try:
        if args.compare:
            return _compare(args.compare, args.last)
        processes, remarks = _read(args.file, args.last)
        if args.trace:
            args.trace.write_text(json.dumps(trace_events.document(processes)))
    except (records.ProbeError, OSError) as error:
        print(escaped(f"probe: {error}"), file=sys.stderr)
        return 1
    _remark(remarks)
    if args.json:
        tables = {
            process.label: {
                "header": process.header,
                "rows": [row._asdict() for row in table.rows(process)],
            }
            for process in processes
        }
        print(json.dumps(tables, indent=1))
    else:
        print(table.text(processes), end="")
        if args.trace:
            print(escaped(f"{args.trace}: open it at https://ui.perfetto.dev"))
    # Without a trace, the table is the only result.
    return 1 if output.lost() and not args.trace else 0


def _read(file: Path, last: float | None) -> tuple[list[records.Process], list[str]]:
    """Read an engine's files; errors as for :func:`engines.engine`."""
    processes, remarks = engines.engine(file)
    if engines.several_hosts(processes):
        remarks.append(
            "these processes ran on several hosts, whose times are aligned by the time of day; it "
            "may differ by milliseconds or more"
        )
    return (engines.newest(processes, last) if last else processes), remarks


def _remark(remarks: Iterable[str]) -> None:
    for sentence in remarks:
        print(escaped(f"probe: {sentence}"), file=sys.stderr)


def _compare(files: Sequence[Path], last: float | None) -> int:
    sides = [_read(file, last) for file in files]
    for _, remarks in sides:
        _remark(remarks)
    one, other = (processes for processes, _ in sides)
    print(compare.text([file.name for file in files], one, other), end="")
    return 1 if output.lost() else 0


def _seconds(text: str) -> float:
    """Parse a length of time: 30s, 500ms, 2m, or seconds without a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is no length of time; write 30s, 500ms or 2m")
    return float(found[1]) * {"ms": 1e-3, "s": 1, "": 1, "m": 60, "h": 3600}[found[2]]


if __name__ == "__main__":
    raise SystemExit(output.run("probe", main))
