"""Show the probe's records.

    python3 scripts/probe FILE [--json] [--trace TRACE.json]

FILE is the value of VLLM_READINESS_PROBE when the engine ran, or the file of one of its
processes (FILE.rank0). Prints a table of p50, p90, p99 and maximum in milliseconds for each
process; --trace also writes a Chrome trace, for https://ui.perfetto.dev. Needs the standard
library only, and not vLLM.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import sys
from collections.abc import Sequence
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

from probe import records, table, trace_events


def main(argv: Sequence[str]) -> int:
    """Print the table; return 0, or 1 if there is nothing to read."""
    parser = argparse.ArgumentParser(prog="probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="the value of VLLM_READINESS_PROBE")
    parser.add_argument("--json", action="store_true", help="the table for programs")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace for Perfetto")
    args = parser.parse_args(argv)
    try:
        processes, left_out = records.engine(args.file)
        if args.trace:
            events = list(trace_events.events(processes))
            args.trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except (records.ProbeError, OSError) as error:
        print(escaped(f"probe: {error}"), file=sys.stderr)
        return 1
    for sentence in left_out:
        print(escaped(f"probe: {sentence}, and left out"), file=sys.stderr)
    if records.several_hosts(processes):
        print(
            "probe: these processes ran on several hosts, whose times are aligned by the time of "
            "day; it may differ by milliseconds or more",
            file=sys.stderr,
        )
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


if __name__ == "__main__":
    raise SystemExit(output.run("probe", main))
