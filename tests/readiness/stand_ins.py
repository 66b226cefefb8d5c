"""Stand-ins for the classes of upstream that the probe observes."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.readiness.watch.probe import events, methods


def config(**parallel: int) -> Any:
    """Return vLLM's configuration, as far as the probe reads it."""
    default = {"rank": 0, "data_parallel_index": 0, "data_parallel_size": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**default | parallel))


def scheduled(tokens: int = 1, continuing: int = 1, result: Any = "executed") -> Any:
    """Return a scheduler's output."""
    cached = SimpleNamespace(req_ids=[f"request-{n}" for n in range(continuing)])
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"request-0": tokens} if tokens else {},
        scheduled_cached_reqs=cached,
        result=result,
    )


def give(result: Any) -> Any:
    """Return a result; raise an exception, call a function."""
    if isinstance(result, Exception):
        raise result
    return result() if callable(result) else result


class Event:
    """Completes when it is waited for."""

    def __init__(self) -> None:
        self.completed = False

    def query(self) -> bool:
        return self.completed

    def synchronize(self) -> None:
        self.completed = True


class StandIns:
    """New classes, observed; their methods return the results that they are passed."""

    def __init__(self, **parallel: int) -> None:
        class ObservedEvent(Event):
            synchronize = events._synchronize(Event.synchronize, methods.record_fence)

        class Runner:
            vllm_config = config(**parallel)

            def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> Any:
                return give(scheduler_output.result), dummy_run

            def sample_tokens(self, result: Any) -> Any:
                return give(result)

        class Output:
            def __init__(self, result: Any) -> None:
                self.result = result
                self.async_copy_ready_event = ObservedEvent()

            def get_output(self) -> Any:
                self.async_copy_ready_event.synchronize()
                return give(self.result)

        class Scheduler:
            vllm_config = config(**parallel)
            kind: type = tuple

            def schedule(self, *arguments: Any) -> Any:
                return self.kind(arguments)

            def update_from_output(self, scheduler_output: Any, output: Any) -> Any:
                return give(scheduler_output), output

        module: Any = SimpleNamespace(
            GPUModelRunner=Runner, AsyncGPUModelRunnerOutput=Output, Scheduler=Scheduler
        )
        for _ in range(2):  # a second time changes nothing
            methods.watch_runner(module)
            methods.watch_scheduler(module)
        self.event: Any = ObservedEvent
        self.runner: Any = Runner()
        self.output: Any = Output
        self.scheduler: Any = Scheduler()

    def step(self, result: Any = "tokens", continuing: int = 1) -> Any:
        """Make a step, and return the result of its sampling."""
        self.runner.execute_model(scheduled(continuing=continuing))
        return self.runner.sample_tokens(result)


def together(*calls: Callable[[], Any]) -> None:
    """Make each call in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
