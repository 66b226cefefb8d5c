"""The cost of one sampling step's penalties, stock beside overlaid, in one run.

    PYTHON scripts/bench/step.py [--site SITE] [--device cpu|cuda] [--batch N] ...

A step is what the runner does for penalties under async scheduling: bring the history up
to date, apply the penalties to the logits, take note of what was sampled. The input batch
and the sampler are vLLM's own, the logits random. Each side runs in processes of its own,
by turns, and both must make the same of the logits. Times are wall-clock time a step, over
steps one after the other with one synchronization at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench.sides import SIDES, Failure, Sides, in_turn, work_beside  # noqa: E402


def child(out: Path, device: str, batch: int, vocab: int, lengths: list[int], steps: int) -> None:
    """Measure one side, and write what was found."""
    import torch
    import vllm
    from vllm.v1.sample.sampler import Sampler

    found: dict[str, Any] = {"package": str(Path(vllm.__file__).parent)}
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({_cpu()})"
    sampler = Sampler()
    with torch.inference_mode():
        for length in lengths:
            found[str(length)] = _measure(sampler, device, batch, vocab, length, steps)
    out.write_text(json.dumps(found))


def _measure(
    sampler: Sampler, device: str, batch: int, vocab: int, length: int, steps: int
) -> dict[str, Any]:
    """Milliseconds a step at an output length, and a digest of the last step's logits."""
    import torch

    generator = torch.Generator().manual_seed(length)
    made = _input_batch(device, batch, vocab, length, 2 * steps, generator)
    given = torch.randn((batch, vocab), generator=generator).to(device)
    sampled = torch.randint(vocab, (2 * steps, batch, 1), generator=generator, dtype=torch.int32)
    on_device = sampled.to(device)
    nothing = torch.zeros(batch, dtype=torch.bool, device=device)
    ours = getattr(made, "readiness", None)
    rows = {f"r{row}": row for row in range(batch)}

    def step(number: int, logits: torch.Tensor) -> torch.Tensor:
        if ours is not None:
            ours.begin_step()
            ours.prepare(logits, None)
        made.update_async_output_token_ids()
        logits = sampler.apply_logits_processors(logits, made.sampling_metadata, False)
        if ours is not None:
            ours.count(on_device[number], nothing)
        made.prev_req_id_to_index = dict(rows)
        if ours is None or not ours.place(made.max_model_len):
            _place(made, batch)
        made.set_async_sampled_token_ids(*_copy(on_device[number]))
        return logits

    logits = given.clone()
    for number in range(steps):  # warms up, and fills caches
        step(number, logits)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(steps, 2 * steps):
        step(number, logits)
    if device == "cuda":
        torch.cuda.synchronize()
    took = (time.perf_counter() - start) / steps * 1e3
    # Once more, on fresh logits, to compare the sides.
    logits = step(0, given.clone())
    digest = hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()
    return {"ms": took, "logits": digest}


def _input_batch(
    device: str, batch: int, vocab: int, length: int, room: int, generator: torch.Generator
) -> InputBatch:
    """A batch of requests with a presence penalty and outputs of one length."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    prompt = 128
    made = InputBatch(
        max_num_reqs=batch,
        max_model_len=prompt + length + room + 8,
        max_num_batched_tokens=8192,
        device=torch.device(device),
        pin_memory=device == "cuda",
        vocab_size=vocab,
        block_sizes=[16],
        kernel_block_sizes=[16],
    )
    for row in range(batch):
        tokens = torch.randint(vocab, (prompt + length,), generator=generator).tolist()
        made.add_request(
            CachedRequestState(
                req_id=f"r{row}",
                prompt_token_ids=tokens[:prompt],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, presence_penalty=1.5),
                generator=None,
                block_ids=([],),
                num_computed_tokens=0,
                output_token_ids=tokens[prompt:],
            )
        )
    made.refresh_metadata()
    return made


def _place(batch: InputBatch, rows: int) -> None:
    """The placeholders that upstream's runner writes, row by row."""
    for row in range(rows):
        at = batch.num_tokens_no_spec[row]
        batch.token_ids_cpu[row, at] = -1
        batch.is_token_ids[row, at] = True
        batch.num_tokens_no_spec[row] = at + 1
        batch.req_output_token_ids[row].append(-1)


class _Done:
    """The event of a copy that needs no waiting: there is no device."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def _copy(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Event | _Done]:
    """The copy of what was sampled to the host, and its event."""
    import torch

    if not sampled.is_cuda:
        return sampled, _Done()
    host = sampled.to("cpu", non_blocking=True)
    event = torch.Event()
    event.record()
    return host, event


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _table(args: argparse.Namespace, rounds: list[dict[str, Any]], digest: str) -> str:
    lines = [
        f"{rounds[0]['stock']['device']}, {datetime.now(timezone.utc).date()}, overlay digest "
        f"{digest[:12]}",
        "",
        f"`{shlex.join([Path(sys.executable).name, *sys.argv])}`",
        "",
        f"One step's penalties, batch {args.batch}, vocabulary {args.vocab:,}, presence_penalty "
        f"1.5; ms a step, median of {len(rounds)} rounds of {args.steps} steps",
        "",
        "| output tokens | stock | overlaid | stock / overlaid |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for length in map(str, args.lengths):
        stock, ours = (
            statistics.median(turn[side][length]["ms"] for turn in rounds) for side in SIDES
        )
        same = len({turn[side][length]["logits"] for turn in rounds for side in turn}) == 1
        ratio = f"{stock / ours:.1f}" if same else "refused: the logits differ"
        lines.append(f"| {int(length):,} | {stock:.3f} | {ours:.3f} | {ratio} |")
    return "\n".join(lines)


def _site() -> Path:
    """Where this Python would import vLLM from, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Failure("this Python has no vLLM; name an installation with --site")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, help="a pristine installation (this Python's)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=16, help="requests (%(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 12288])
    parser.add_argument("--steps", type=int, default=10, help="of each length (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; 0 if both sides made the same of the logits."""
    args = _parser().parse_args(argv)
    if args.child:
        child(args.child, args.device, args.batch, args.vocab, args.lengths, args.steps)
        return 0
    work = None
    try:
        site = (args.site or _site()).resolve()
        work = work_beside(site)
        sides = Sides(site, work, sys.executable)
        rounds = [_round(sides, work, args, argv, turn) for turn in range(args.rounds)]
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        if work:
            shutil.rmtree(work, ignore_errors=True)
    table = _table(args, rounds, sides.digests["overlaid"])
    print(table)
    return "refused" in table


def _round(
    sides: Sides, work: Path, args: argparse.Namespace, argv: Sequence[str], turn: int
) -> dict[str, Any]:
    """What each side found; they take turns at being the first.

    Raises:
        Failure: a side failed.
    """
    found = {}
    out, log = work / "out.json", work / "log"
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--child", str(out)]
    for side in in_turn(turn):
        code = sides.run(side, command, log, args.timeout, {})
        if code != 0:
            raise Failure(f"{side} failed ({code}):\n{log.read_text(errors='replace')[-3000:]}")
        found[side] = json.loads(out.read_text())
        sides.check_import(side, found[side]["package"])
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
