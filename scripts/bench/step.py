"""The cost of one feature in a sampling step, stock beside overlaid, in one run.

    PYTHON scripts/bench/step.py [--what WHAT...] [--site SITE] [--device cpu|cuda] ...

A step is what the runner does for the feature under async scheduling: bring the history up
to date, process the logits, take note of what was sampled. The input batch and the sampler
are vLLM's own, the logits random. Each side runs in processes of its own, by turns, and both
must make the same of the logits. Times are wall-clock time a step, over steps one after the
other with one synchronization at the end; of a thinking budget, whose work is the host's,
the host's time from the beginning of a step until its logits are processed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench import report, thinking  # noqa: E402
from bench.machine import describe  # noqa: E402
from bench.report import REFUSED  # noqa: E402
from bench.sides import SIDES, Failure, by_turns  # noqa: E402
from overlay import output  # noqa: E402


@dataclass(frozen=True)
class What:
    """What may be measured.

    Attributes:
        title: what the requests ask for.
        unit: what the times are.
        cases: of each length.
    """

    title: str
    unit: str = "ms a step"
    cases: Sequence[str] = ("",)


WHAT: Mapping[str, What] = {
    "penalties": What("presence_penalty 1.5"),
    "thinking": What(
        "a budget that lasts",
        "ms of the host a step",
        ("start in the output", "no start", "start in the prompt"),
    ),
    "bad-words": What("5 words of 1 to 3 tokens a request"),
}
PROMPT = 128
#: Tokens below this are kept for the markers of thinking.
RESERVED = 1 + max(*thinking.START, *thinking.END)


def child(out: Path, args: argparse.Namespace) -> None:
    """Measure one side, and write what was found."""
    import torch
    import vllm
    from vllm.v1.sample.sampler import Sampler

    if args.device == "cpu":
        thinking.unpin()
    found: dict[str, Any] = {"package": str(Path(vllm.__file__).parent)}
    found["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    sampler = Sampler()
    with torch.inference_mode():
        for what in args.what:
            found[what] = {
                _label(length, case): _measure(sampler, args, what, length, case)
                for length in args.lengths
                for case in WHAT[what].cases
            }
    out.write_text(json.dumps(found))


def _measure(
    sampler: Sampler, args: argparse.Namespace, what: str, length: int, case: str
) -> dict[str, Any]:
    """Milliseconds a step at an output length, and a digest of logits to compare."""
    import torch

    generator = torch.Generator().manual_seed(length)
    steps = Steps(sampler, args, what, length, case, generator)
    given = torch.randn((args.batch, args.vocab), generator=generator).to(args.device)

    def synchronize() -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()

    logits = given.clone()
    for number in range(args.steps):  # warms up, and fills caches
        steps.step(number, logits)
    synchronize()
    steps.host = 0.0
    start = time.perf_counter()
    for number in range(args.steps, 2 * args.steps):
        steps.step(number, logits)
    synchronize()
    took = steps.host if what == "thinking" else time.perf_counter() - start
    # Once more, on fresh logits, to compare the sides.
    compared = [steps.step(0, given.clone())]
    if what == "thinking":  # and as the budgets are used up, one after the other
        near = Steps(sampler, args, what, length, case, generator, near=True)
        compared += [near.step(number, given.clone()) for number in range(2 * args.steps)]
    digest = hashlib.sha256()
    for each in compared:
        digest.update(each.cpu().numpy().tobytes())
    return {"ms": took / args.steps * 1e3, "logits": digest.hexdigest()}


class Steps:
    """A batch of requests with outputs of one length, and its steps.

    Attributes:
        host: seconds that the host has spent so far on the logits, and on the history before.
    """

    def __init__(
        self,
        sampler: Sampler,
        args: argparse.Namespace,
        what: str,
        length: int,
        case: str,
        generator: torch.Generator,
        near: bool = False,
    ) -> None:
        """Make the batch; ``near``: with thinking budgets that end in these steps."""
        import torch

        self.sampler = sampler
        self.batch = args.batch
        self.host = 0.0
        shape = (2 * args.steps, self.batch, 1)
        sampled = torch.randint(RESERVED, args.vocab, shape, generator=generator, dtype=torch.int32)
        if near:  # some requests give the end that they are forced to, others its beginning
            sampled[:, 1::3] = thinking.END[0]
            sampled[:, 2::3] = torch.tensor(thinking.END * args.steps).view(-1, 1, 1)
        self.sampled = sampled.to(args.device)
        self.discarded = torch.zeros(self.batch, dtype=torch.bool, device=args.device)
        self.rows = {f"r{row}": row for row in range(self.batch)}
        self.made = _input_batch(args, what, length)
        for row in range(self.batch):
            tokens = torch.randint(
                RESERVED, args.vocab, (PROMPT + length,), generator=generator
            ).tolist()
            at = {"start in the output": PROMPT + 4, "start in the prompt": PROMPT - 8}.get(case)
            if at is not None:
                tokens[at : at + len(thinking.START)] = thinking.START
            budget = max(0, length + row % (2 * args.steps) - 8) if near else 2 * length + PROMPT
            last = sampled[-2:, row, 0].tolist()
            params = _parameters(what, budget, tokens[:5], last)
            _add(self.made, f"r{row}", tokens, params)
        self.made.refresh_metadata()
        self.ours = getattr(self.made, "readiness", None)

    def step(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Process these logits, in place, and sample what was drawn for this step."""
        made, ours, sampled = self.made, self.ours, self.sampled[number]
        start = time.perf_counter()
        if ours is not None:
            ours.begin_step()
        made.update_async_output_token_ids()
        if ours is not None:
            ours.prepare(logits, None)
        logits = self.sampler.apply_logits_processors(logits, made.sampling_metadata, False)
        self.host += time.perf_counter() - start
        if ours is not None:
            ours.count(sampled, self.discarded)
        made.prev_req_id_to_index = dict(self.rows)
        if ours is None or not ours.place(made.max_model_len):
            _place(made, self.batch)
        made.set_async_sampled_token_ids(*_copy(sampled))
        return logits


def _parameters(what: str, budget: int, some: list[int], last: list[int]) -> SamplingParams:
    """What a request asks for.

    Args:
        what: is measured.
        budget: in tokens.
        some: five tokens.
        last: the two tokens that the last step follows on.
    """
    from vllm.sampling_params import SamplingParams

    if what == "penalties":
        return SamplingParams(temperature=0.0, presence_penalty=1.5)
    if what == "thinking":
        return SamplingParams(temperature=0.0, thinking_token_budget=budget)
    made = SamplingParams(temperature=0.0)
    # Words are turned to tokens by a tokenizer, and there is none.
    made._bad_words_token_ids = [
        [some[0]],
        [some[1]],
        [last[1], some[2]],
        [*last, some[3]],
        [*last[::-1], some[4]],
    ]
    return made


def _input_batch(args: argparse.Namespace, what: str, length: int) -> InputBatch:
    """An empty batch, as the runner makes it."""
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch

    reasoning = thinking.config() if what == "thinking" else None
    return InputBatch(
        max_num_reqs=args.batch,
        max_model_len=PROMPT + length + 2 * args.steps + 8,
        max_num_batched_tokens=8192,
        device=torch.device(args.device),
        pin_memory=args.device == "cuda",
        vocab_size=args.vocab,
        block_sizes=[16],
        kernel_block_sizes=[16],
        logitsprocs_need_output_token_ids=reasoning is not None,
        reasoning_config=reasoning,
    )


def _add(batch: InputBatch, name: str, tokens: list[int], params: SamplingParams) -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    batch.add_request(
        CachedRequestState(
            req_id=name,
            prompt_token_ids=tokens[:PROMPT],
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=tokens[PROMPT:],
        )
    )


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


def _run(
    args: argparse.Namespace,
    rounds: Sequence[Mapping[str, Any]],
    started: float,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """What was found, of a run's JSON."""
    lines, problems = [], []
    for what in args.what:
        found = [{side: turn[side][what] for side in SIDES} for turn in rounds]
        made, refused = _table(what, found)
        lines += made
        problems += refused
    asked = "; ".join(f"{what}: {WHAT[what].title}, {WHAT[what].unit}" for what in args.what)
    return {
        **describe("table", started, digests, rounds[0]["stock"]["device"], args.site),
        "title": f"One step, batch {args.batch}, vocabulary {args.vocab:,}. {asked}. "
        f"Median of {len(rounds)} rounds of {args.steps} steps",
        "note": None,
        "columns": ["what", "output tokens", "case", *SIDES, "stock / overlaid"],
        "align": ["l", "r", "l", "r", "r", "r"],
        "rows": lines,
        "problems": problems,
    }


def _table(
    what: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]]
) -> tuple[list[list[Any]], list[str]]:
    """The table's rows, and why ratios are refused.

    Args:
        what: was measured.
        rounds: of each round, side to label to what was found.
    """
    rows: list[list[Any]] = []
    problems = []
    for label in rounds[0]["stock"]:
        seen = [[turn[side][label]["ms"] for turn in rounds] for side in SIDES]
        stock, ours = map(statistics.median, seen)
        same = len({turn[side][label]["logits"] for turn in rounds for side in turn}) == 1
        if not same:
            problems.append(f"{what}, {label}: the logits differ")
        length, _, case = label.partition(", ")
        ratio = report.marked(stock / ours, *seen) if same else REFUSED
        rows.append([what, int(length), case, stock, ours, ratio])
    return rows, problems


def _label(length: int, case: str) -> str:
    return f"{length}, {case}" if case else str(length)


def _site() -> Path:
    """Where this Python would import vLLM from, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Failure("this Python has no vLLM; name an installation with --site")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", nargs="+", choices=list(WHAT), default=["penalties"])
    parser.add_argument("--site", type=Path, help="a pristine installation (this Python's)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=16, help="requests (%(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 12288])
    parser.add_argument("--steps", type=int, default=10, help="of each length (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    parser.add_argument("--json", type=Path, help="write the run to this file, too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; 0 if both sides made the same of the logits."""
    args = _parser().parse_args(argv)
    if args.child:
        child(args.child, args)
        return 0
    started = time.monotonic()
    try:
        args.site = (args.site or _site()).resolve()
        rounds, digests = by_turns(Path(__file__), args.site, argv, args.rounds, args.timeout)
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return report.publish(_run(args, rounds, started, digests), args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
