"""A request's output depends neither on the overlay, nor on the schedule, nor on timing.

One process of stock, one of the overlay, and one of the overlay switched off run all requests, on
CPU engines that schedule synchronously, and then on a simulated device, asynchronously.
"""

import json
from typing import Any

import pytest
from engine import mixed
from engine.outputs import CHECK, REFERENCE
from engine.simulated import EXAMPLES
from support import thinking
from support.engine import PreloadedEngine, Run
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "outputs.py"
#: Parts that both installations run.
BOTH = ("mixed sync", "mixed async", "processor async")


@pytest.fixture(scope="module")
def reference(stock: PreloadedEngine) -> Run:
    """Stock's run."""
    run = stock.start(PROGRAM, ["-", REFERENCE, *BOTH])
    run.finish()
    return run


@pytest.fixture(scope="module")
def stock_report(reference: Run) -> Any:
    """Stock's report."""
    return reference.finish()


@pytest.fixture(scope="module")
def overlaid_report(reference: Run, overlaid: PreloadedEngine) -> Any:
    """The overlay's report; without a fix, as stock forces an end marker into request-84."""
    settings = {"VLLM_READINESS": "-thinking-rows"}
    return overlaid.start(
        PROGRAM, [str(reference.out), *BOTH, CHECK], environment=settings
    ).finish()


@pytest.fixture(scope="module")
def off_report(overlaid: PreloadedEngine) -> Any:
    """The report of the overlay switched off."""
    return overlaid.start(
        PROGRAM, ["-", "mixed async"], environment={"VLLM_READINESS": "off"}
    ).finish()


@pytest.fixture(params=["stock_report", "overlaid_report"])
def report(request: pytest.FixtureRequest) -> Any:
    """Either installation's report."""
    return request.getfixturevalue(request.param)


def _values(outputs: dict[str, Any]) -> list[float]:
    """Return the logprobs' values, by request; outputs are in the order of their ends."""
    tops = [top for name in sorted(outputs) for top in outputs[name]["logprobs"] or ()]
    return [value for top in tops for _, value, _ in top]


def _without_values(outputs: dict[str, Any]) -> dict[str, Any]:
    """Each output, with tokens and ranks for logprobs."""

    def ranks(logprobs: Any) -> Any:
        return logprobs and [[[token, rank] for token, _, rank in top] for top in logprobs]

    return {name: {**out, "logprobs": ranks(out["logprobs"])} for name, out in outputs.items()}


class TestMixedRequests:
    """Requests that arrive, leave, are preempted and are prefilled in chunks."""

    @pytest.mark.parametrize("part", ["mixed sync", "mixed async", "processor async"])
    def test_overlay_equals_stock_bit_for_bit(
        self, part: str, stock_report: Any, overlaid_report: Any
    ) -> None:
        assert overlaid_report[part]["outputs"] == stock_report[part]["outputs"]

    def test_switched_off_overlay_equals_stock(self, stock_report: Any, off_report: Any) -> None:
        assert off_report["mixed async"]["outputs"] == stock_report["mixed async"]["outputs"]

    def test_both_schedules_give_the_same_tokens(self, report: Any) -> None:
        """The last bits of the logits depend on which tokens are computed together."""
        one, other = (report[part]["outputs"] for part in ("mixed sync", "mixed async"))
        assert _without_values(one) == _without_values(other)
        assert _values(one) == pytest.approx(_values(other), rel=1e-4, abs=1e-4)

    def test_requests_were_preempted_resumed_chunked_and_aborted(self, report: Any) -> None:
        names = {request.name for request in mixed.requests() if request.aborted is None}
        assert 80 <= len(names) <= mixed.REQUESTS - 10
        for part in ("mixed sync", "mixed async", "processor async"):
            stats = report[part]["stats"]
            assert stats["preempted"] >= 4, part
            assert stats["resumed"] >= 4, part
            assert stats["prefill chunks"] >= 20, part
            assert report[part]["outputs"].keys() == names, part

    def test_answers_are_diverse(self, stock_report: Any) -> None:
        """Otherwise identical outputs would say little."""
        outputs = list(stock_report["mixed sync"]["outputs"].values())
        assert len({json.dumps(output["tokens"]) for output in outputs}) > 0.9 * len(outputs)
        assert len({token for output in outputs for token in output["tokens"]}) > 500
        assert {output["finish"] for output in outputs} == {"length", "stop"}
        assert sum(output["logprobs"] is not None for output in outputs) > 40

    def test_processor_decides_by_the_newest_tokens(
        self, stock_report: Any, overlaid_report: Any
    ) -> None:
        """With it, no token recurs within two; without it, some do."""

        def repeats(outputs: dict[str, Any]) -> int:
            lists = [output["tokens"] for output in outputs.values()]
            return sum(
                token in tokens[max(0, n - 2) : n]
                for tokens in lists
                for n, token in enumerate(tokens)
            )

        assert repeats(stock_report["mixed async"]["outputs"]) > 20
        assert repeats(overlaid_report["processor async"]["outputs"]) == 0

    def test_thinking_ended_where_its_budget_was_used_up(self, report: Any) -> None:
        """Otherwise identical outputs would say little of budgets."""
        for part in ("mixed sync", "mixed async"):
            outputs = report[part]["outputs"]
            ended = [
                request
                for request in mixed.requests()
                if request.params.get("thinking_token_budget", 100) < 20
                and request.name in outputs
                and thinking.ended(outputs[request.name]["tokens"])
            ]
            assert len(ended) > 8


def test_engines_scheduled_as_they_were_asked_to(report: Any) -> None:
    parts = {name: part["stats"] for name, part in report.items() if "stats" in part}
    assert len(parts) >= len(BOTH)
    for name, stats in parts.items():
        asynchronous = name.endswith("async")
        assert stats["scheduler"] == ("AsyncScheduler" if asynchronous else "Scheduler"), name
        assert (stats["outputs handed over unready"] > 100) == asynchronous, name


def test_caches_of_compiled_code_stay_valid(
    stock_report: Any, overlaid_report: Any, off_report: Any
) -> None:
    """VLLM keys them by its variables, but not by ours."""
    keys = [each["factors"] for each in (stock_report, overlaid_report, off_report)]
    assert len(keys[0]) > 50
    assert keys[0] == keys[1] == keys[2]


class TestSimulatedDevice:
    """Drawn sets of requests and timings, on one engine."""

    def test_every_request_gave_stocks_output(self, overlaid_report: Any) -> None:
        """The run fails at the first that does not."""
        assert overlaid_report[CHECK]["examples"] >= EXAMPLES * 3 // 4

    def test_host_waited_for_no_whole_stream(self, overlaid_report: Any) -> None:
        stats = overlaid_report[CHECK]["stats"]
        assert stats["stream_waits"] == 0
        assert stats["strays"] == 0

    def test_readbacks_were_late_in_many_situations(self, overlaid_report: Any) -> None:
        stats = overlaid_report[CHECK]["stats"]
        assert stats["outputs handed over unready"] > 200
        assert stats["copies"] > 300
        assert stats["prefill chunks"] > 20
        assert stats["preempted"] >= 1
        assert stats["allocations"] < 100, "buffers are not reused"
