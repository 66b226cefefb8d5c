"""Measure one feature in a sampling step, stock beside overlaid.

    PYTHONPATH=scripts python -m bench.step [--what FEATURE...] [--site SITE] [--device cuda] ...

A step does what the runner does for the feature under async scheduling: bring the history up to
date, process the logits, record the sampled tokens. The input batch and the sampler are vLLM's
own, the logits random. Each side runs in processes of its own, by turns, and both must process
the logits alike. Times are wall-clock time a step, over steps one after the other with one
synchronization at the end. A thinking budget works on the host; its time is the host's, from the
beginning of a step until its logits are processed.
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

from overlay import output

from bench import thinking
from bench.compare.installations import SIDES
from bench.compare.machine import describe
from bench.compare.turns import by_turns
from bench.errors import Failure
from bench.reports.figures import REFUSED, mark, with_mark
from bench.reports.markdown import publish

if TYPE_CHECKING:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch


@dataclass(frozen=True)
class Feature:
    """A feature that can be measured.

    Attributes:
        title: the requests' parameters.
        unit: of the times.
        cases: of each output length.
    """

    title: str
    unit: str = "ms a step"
    cases: Sequence[str] = ("",)


FEATURES: Mapping[str, Feature] = {
    "penalties": Feature("presence_penalty 1.5"),
    "thinking": Feature(
        "a budget that lasts",
        "ms of the host a step",
        ("start in the output", "no start", "start in the prompt"),
    ),
    "bad-words": Feature("5 words of 1 to 3 tokens a request"),
}
PROMPT = 128
#: Tokens below this are reserved for the markers of thinking.
RESERVED = 1 + max(*thinking.START, *thinking.END)


def child(out: Path, args: argparse.Namespace) -> None:
    """Measure the vLLM of this process, and write the times and digests."""
    import torch
    import vllm
    from vllm.v1.sample.sampler import Sampler

    if args.device == "cpu":
        thinking.unpin()
    result: dict[str, Any] = {
        "package": str(Path(vllm.__file__).parent),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    }
    sampler = Sampler()
    with torch.inference_mode():
        for name in args.what:
            result[name] = {
                _label(length, case): _measure(sampler, args, name, length, case)
                for length in args.lengths
                for case in FEATURES[name].cases
            }
    out.write_text(json.dumps(result))


def _measure(
    sampler: Sampler, args: argparse.Namespace, feature: str, length: int, case: str
) -> dict[str, Any]:
    """Return the milliseconds a step at an output length, and a digest of processed logits."""
    import torch

    generator = torch.Generator().manual_seed(length)
    steps = Steps(sampler, args, feature, length, case, generator)
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
    seconds = steps.host if feature == "thinking" else time.perf_counter() - start
    # Once more, on fresh logits, to compare the sides.
    compared = [steps.step(0, given.clone())]
    if feature == "thinking":  # and while the budgets run out, one after the other
        near = Steps(sampler, args, feature, length, case, generator, near=True)
        compared += [near.step(number, given.clone()) for number in range(2 * args.steps)]
    digest = hashlib.sha256()
    for processed in compared:
        digest.update(processed.cpu().numpy().tobytes())
    return {"ms": seconds / args.steps * 1e3, "logits": digest.hexdigest()}


class Steps:
    """A batch of requests with outputs of one length, and its steps.

    Attributes:
        host: seconds of the host so far, on the history and the logits.
    """

    def __init__(
        self,
        sampler: Sampler,
        args: argparse.Namespace,
        feature: str,
        length: int,
        case: str,
        generator: torch.Generator,
        near: bool = False,
    ) -> None:
        """Make the batch; ``near``: with thinking budgets that run out in these steps."""
        import torch

        self.sampler = sampler
        self.rows = args.batch
        self.host = 0.0
        shape = (2 * args.steps, self.rows, 1)
        sampled = torch.randint(RESERVED, args.vocab, shape, generator=generator, dtype=torch.int32)
        if near:  # some requests sample the end marker by themselves, others its first token
            sampled[:, 1::3] = thinking.END[0]
            sampled[:, 2::3] = torch.tensor(thinking.END * args.steps).view(-1, 1, 1)
        self.sampled = sampled.to(args.device)
        self.discarded = torch.zeros(self.rows, dtype=torch.bool, device=args.device)
        self.row_of = {f"r{row}": row for row in range(self.rows)}
        self.batch = _input_batch(args, feature, length)
        for row in range(self.rows):
            tokens = torch.randint(
                RESERVED, args.vocab, (PROMPT + length,), generator=generator
            ).tolist()
            marker = {"start in the output": PROMPT + 4, "start in the prompt": PROMPT - 8}
            if case in marker:
                tokens[marker[case] : marker[case] + len(thinking.START)] = thinking.START
            budget = max(0, length + row % (2 * args.steps) - 8) if near else 2 * length + PROMPT
            last = sampled[-2:, row, 0].tolist()
            params = _parameters(feature, budget, tokens[:5], last)
            _add(self.batch, f"r{row}", tokens, params)
        self.batch.refresh_metadata()
        self.live = getattr(self.batch, "readiness", None)

    def step(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Process these logits in place, and sample the tokens drawn for this step.

        Args:
            number: of the step, from 0.
            logits: [batch, vocabulary] float32.
        """
        batch, live, sampled = self.batch, self.live, self.sampled[number]
        start = time.perf_counter()
        if live is not None:
            live.begin_step()
        batch.update_async_output_token_ids()
        if live is not None:
            live.prepare(logits, None)
        logits = self.sampler.apply_logits_processors(logits, batch.sampling_metadata, False)
        self.host += time.perf_counter() - start
        if live is not None:
            live.observe_sampled(sampled, self.discarded)
        batch.prev_req_id_to_index = dict(self.row_of)
        if live is None or not live.place(batch.max_model_len):
            _place(batch, self.rows)
        batch.set_async_sampled_token_ids(*_copy(sampled))
        return logits


def _parameters(feature: str, budget: int, some: list[int], last: list[int]) -> SamplingParams:
    """Return the parameters of a request.

    Args:
        feature: the measured one.
        budget: in tokens.
        some: five tokens.
        last: the two tokens before the last step.
    """
    from vllm.sampling_params import SamplingParams

    if feature == "penalties":
        return SamplingParams(temperature=0.0, presence_penalty=1.5)
    if feature == "thinking":
        return SamplingParams(temperature=0.0, thinking_token_budget=budget)
    params = SamplingParams(temperature=0.0)
    # vLLM makes tokens of words by a tokenizer, and there is none.
    params._bad_words_token_ids = [
        [some[0]],
        [some[1]],
        [last[1], some[2]],
        [*last, some[3]],
        [*last[::-1], some[4]],
    ]
    return params


def _input_batch(args: argparse.Namespace, feature: str, length: int) -> InputBatch:
    """Return an empty batch with the runner's arguments."""
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch

    reasoning = thinking.config() if feature == "thinking" else None
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
    """Write the placeholders of a step, row by row, as upstream's runner does."""
    for row in range(rows):
        end = batch.num_tokens_no_spec[row]
        batch.token_ids_cpu[row, end] = -1
        batch.is_token_ids[row, end] = True
        batch.num_tokens_no_spec[row] = end + 1
        batch.req_output_token_ids[row].append(-1)


class _NoEvent:
    """The event of a copy that needs no wait, because there is no device."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def _copy(sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Event | _NoEvent]:
    """Copy sampled tokens to the host; return the copy and its event."""
    import torch

    if not sampled.is_cuda:
        return sampled, _NoEvent()
    host = sampled.to("cpu", non_blocking=True)
    event = torch.Event()
    event.record()
    return host, event


def table(
    feature: str, rounds: Sequence[Mapping[str, Mapping[str, Any]]]
) -> tuple[list[list[Any]], list[str]]:
    """Return the table's rows, and why ratios are refused.

    Args:
        feature: the measured one.
        rounds: for each round, side to label to time and digest.
    """
    rows: list[list[Any]] = []
    problems = []
    for label in rounds[0]["stock"]:
        stocks, ours = ([turn[side][label]["ms"] for turn in rounds] for side in SIDES)
        medians = statistics.median(stocks), statistics.median(ours)
        ratio: object = with_mark(medians[0] / medians[1], mark(stocks, ours))
        if len({turn[side][label]["logits"] for turn in rounds for side in turn}) > 1:
            problems.append(f"{feature}, {label}: the logits differ")
            ratio = REFUSED
        length, _, case = label.partition(", ")
        rows.append([feature, int(length), case, *medians, ratio])
    return rows, problems


def _label(length: int, case: str) -> str:
    return f"{length}, {case}" if case else str(length)


def _site() -> Path:
    """Return the directory from which this Python would import vLLM, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise Failure("this Python has no vLLM; name an installation with --site")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--what", nargs="+", choices=list(FEATURES), default=["penalties"])
    parser.add_argument("--site", type=Path, help="a pristine installation (this Python's)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=16, help="requests (%(default)s)")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 12288])
    parser.add_argument("--steps", type=int, default=10, help="of each length (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one child")
    parser.add_argument("--json", type=Path, help="also write the run to this file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; 0 if both sides processed the logits alike, else 1."""
    args = _parser().parse_args(argv)
    if args.child:
        child(args.child, args)
        return 0
    started = time.monotonic()
    try:
        args.site = (args.site or _site()).resolve()
        rounds, digests = by_turns("bench.step", args.site, argv, args.rounds, args.timeout)
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    rows: list[list[Any]] = []
    problems: list[str] = []
    for name in args.what:
        more, refused = table(name, [{side: turn[side][name] for side in SIDES} for turn in rounds])
        rows += more
        problems += refused
    asked = "; ".join(f"{n}: {FEATURES[n].title}, {FEATURES[n].unit}" for n in args.what)
    run = {
        **describe("table", started, digests, rounds[0]["stock"]["device"], args.site),
        "title": f"One step, batch {args.batch}, vocabulary {args.vocab:,}. {asked}. "
        f"Median of {len(rounds)} rounds of {args.steps} steps",
        "note": None,
        "columns": ["what", "output tokens", "case", *SIDES, "stock / overlaid"],
        "align": ["l", "r", "l", "r", "r", "r"],
        "rows": rows,
        "problems": problems,
    }
    return publish(run, args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
