"""What an engine went through, for a test to show that it tried what it says."""

from typing import Any


class Witness:
    """Counts what an engine's scheduler decides, and what its worker hands over."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.preempted = self.resumed = self.chunks = self.steps = 0
        scheduler = engine.engine_core.engine_core.scheduler
        self.scheduler = type(scheduler).__name__
        schedule = scheduler.schedule

        def counted(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.steps += 1
            self.preempted += len(output.preempted_req_ids or ())
            self.resumed += len(output.scheduled_cached_reqs.resumed_req_ids)
            self.chunks += sum(
                scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
            )
            return output

        scheduler.schedule = counted
        engine.collective_rpc(_watch)

    def evidence(self) -> dict[str, Any]:
        """The scheduler's class, and the counts."""
        (unready,) = self.engine.collective_rpc(_unready)
        return {
            "scheduler": self.scheduler,
            "steps": self.steps,
            "preempted": self.preempted,
            "resumed": self.resumed,
            "prefill chunks": self.chunks,
            "outputs handed over unready": unready,
        }


def _watch(worker: Any) -> None:
    """In the worker's process: count the outputs that are made before they are ready."""
    from vllm.v1.worker import gpu_model_runner

    class Counted(gpu_model_runner.AsyncGPUModelRunnerOutput):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            worker.unready += 1

    worker.unready = 0
    gpu_model_runner.AsyncGPUModelRunnerOutput = Counted


def _unready(worker: Any) -> int:
    return int(worker.unready)
