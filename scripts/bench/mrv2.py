"""Device time of Model Runner V2's sampler, stock beside overlaid, in one run.

    PYTHON scripts/bench/mrv2.py --site SITE [--batch N] [--vocab N] [--rounds N]

The sampler and its states are vLLM's own, the logits random. Each side runs in processes of
its own, by turns, and both must sample the same tokens with the same logprobs. The device is
kept busy until all calls have been queued, so that its time is that of the kernels and the
gaps between them; the host's time is what it takes to queue a call.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.sample.sampler import Sampler

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench import report  # noqa: E402
from bench.machine import describe  # noqa: E402
from bench.report import REFUSED  # noqa: E402
from bench.sides import SIDES, Failure, by_turns  # noqa: E402
from overlay import output  # noqa: E402

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
RANDOM: Mapping[str, Any] = {"temperature": 1.0}
TOP_P: Mapping[str, Any] = {"temperature": 1.0, "top_p": 0.9}
WARM: Mapping[str, Any] = {"temperature": 0.7}
#: Case to what every request asks for, what the others ask for, and how many these are.
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], int]] = {
    "greedy": (GREEDY, {}, 0),
    "temperature 1": (RANDOM, {}, 0),
    "temperature 1, logprobs 5": ({**RANDOM, "logprobs": 5}, {}, 0),
    "temperature 0.7": (WARM, {}, 0),
    "top_p 0.9": (TOP_P, {}, 0),
    "one with top_p 0.9": (RANDOM, TOP_P, 1),
    "16 with top_p 0.9": (RANDOM, TOP_P, 16),
    "32 with top_p 0.9": (RANDOM, TOP_P, 32),
    "one with temperature 0.7": (RANDOM, WARM, 1),
}
#: Long enough on the device for the host to queue every call of a measurement.
BUSY_CYCLES = 200_000_000


def child(out: Path, batch: int, vocab: int, calls: int) -> None:
    """Measure one side, and write what was found."""
    import torch
    import vllm

    found: dict[str, Any] = {"package": str(Path(vllm.__file__).parent)}
    found["device"] = torch.cuda.get_device_name()
    with torch.inference_mode():
        for name, (everyone, few, count) in CASES.items():
            asks = [few if row < count else everyone for row in range(batch)]
            found[name] = _measure(asks, vocab, calls)
    out.write_text(json.dumps(found))


def _measure(asks: Sequence[Mapping[str, Any]], vocab: int, calls: int) -> dict[str, Any]:
    """Milliseconds a call on the device and on the host, and a digest of what is sampled."""
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    device, count = torch.device("cuda"), len(asks)
    sampler = _sampler(asks, vocab, device)
    batch = InputBatch.make_dummy(count, count, InputBuffers(count, count, device))
    generator = torch.Generator(device).manual_seed(count)
    logits = torch.randn((count, vocab), device=device, generator=generator) * 6
    given = logits.to(torch.bfloat16)
    digest = hashlib.sha256()
    for position in range(8):  # warms up, and fills caches
        batch.positions.fill_(position)
        result = sampler(given, batch)
        digest.update(result.sampled_token_ids.cpu().numpy().tobytes())
        if result.logprobs_tensors is not None:
            digest.update(result.logprobs_tensors.logprobs.cpu().numpy().tobytes())
            digest.update(result.logprobs_tensors.logprob_token_ids.cpu().numpy().tobytes())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        sampler(given, batch)
    host = (time.perf_counter() - start) / calls * 1e3
    queued = not begin.query()
    end.record()
    torch.cuda.synchronize()
    return {
        "device ms": begin.elapsed_time(end) / calls,
        "host ms": host,
        "queued": queued,
        "digest": digest.hexdigest(),
    }


def _sampler(asks: Sequence[Mapping[str, Any]], vocab: int, device: torch.device) -> Sampler:
    """A sampler that knows the requests, each of which has a seed of its own."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    states = RequestState(len(asks), 64, 8192, 0, vocab, device)
    sampler = Sampler(len(asks), vocab, device, states)
    for row, ask in enumerate(asks):
        sampler.add_request(row, 4, SamplingParams(seed=row, **ask))
    sampler.apply_staged_writes()
    return sampler


def table(
    rounds: Sequence[Mapping[str, Any]],
) -> tuple[list[list[Any]], list[str]]:
    """The table's rows, and why ratios are refused: the sides differ, or the host was too slow."""
    rows: list[list[Any]] = []
    problems = []
    for case in CASES:
        found: dict[str, list[Mapping[str, Any]]] = {
            side: [turn[side][case] for turn in rounds] for side in SIDES
        }
        device, host = (
            [statistics.median(turn[of] for turn in found[side]) for side in SIDES]
            for of in ("device ms", "host ms")
        )
        every = [turn for turns in found.values() for turn in turns]
        seen = ([turn["device ms"] for turn in found[side]] for side in SIDES)
        ratio: object = report.marked(device[1] / device[0], *seen)
        if len({turn["digest"] for turn in every}) > 1:
            problems.append(f"{case}: the tokens or logprobs differ")
            ratio = REFUSED
        elif not all(turn["queued"] for turn in every):
            problems.append(f"{case}: the device waited for the host")
            ratio = REFUSED
        rows.append([case, *device, ratio, *host])
    return rows, problems


def _run(
    args: argparse.Namespace,
    rounds: Sequence[Mapping[str, Any]],
    started: float,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """What was found, of a run's JSON."""
    rows, problems = table(rounds)
    device = rounds[0]["stock"]["device"]
    return {
        **describe("table", started, digests, device, args.site),
        "title": f"One call of MRV2's sampler, batch {args.batch}, vocabulary {args.vocab:,}, "
        f"bfloat16; device and host time in ms, median of {len(rounds)} rounds of "
        f"{args.calls} calls",
        "note": None,
        "columns": ["case", *SIDES, "overlaid / stock", *(f"host: {side}" for side in SIDES)],
        "align": ["l", "r", "r", "r", "r", "r"],
        "rows": rows,
        "problems": problems,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, required=True, help="a pristine installation")
    parser.add_argument("--batch", type=int, default=128, help="requests (%(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens (%(default)s)")
    parser.add_argument("--calls", type=int, default=30, help="of each case (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds for one child")
    parser.add_argument("--json", type=Path, help="write the run to this file, too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; 0 if both sides sampled the same."""
    args = _parser().parse_args(argv)
    if args.child:
        child(args.child, args.batch, args.vocab, args.calls)
        return 0
    started = time.monotonic()
    try:
        rounds, digests = by_turns(Path(__file__), args.site, argv, args.rounds, args.timeout)
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return report.publish(_run(args, rounds, started, digests), args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
