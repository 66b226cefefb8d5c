"""Counts of an engine's events, to show that a test covers what it claims."""

from typing import Any


class ScheduleStats:
    """Counts of what an engine's scheduler decides, in this process."""

    def __init__(self, engine: Any) -> None:
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

    def to_json(self) -> dict[str, Any]:
        """Return the scheduler's class, and the counts."""
        return {
            "scheduler": self.scheduler,
            "steps": self.steps,
            "preempted": self.preempted,
            "resumed": self.resumed,
            "prefill chunks": self.chunks,
        }


class EngineStats(ScheduleStats):
    """Counts of what an engine's scheduler decides and its worker hands over."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.engine = engine
        engine.collective_rpc(_count_unready)

    def to_json(self) -> dict[str, Any]:
        """Return the scheduler's class, and the counts."""
        (unready,) = self.engine.collective_rpc(_unready)
        return {**super().to_json(), "outputs handed over unready": unready}


def _count_unready(worker: Any) -> None:
    """In the worker's process, count the outputs that are handed over before they are ready."""
    from vllm.v1.worker import gpu_model_runner

    class Counted(gpu_model_runner.AsyncGPUModelRunnerOutput):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            worker.unready += 1

    worker.unready = 0
    gpu_model_runner.AsyncGPUModelRunnerOutput = Counted


def _unready(worker: Any) -> int:
    return int(worker.unready)
