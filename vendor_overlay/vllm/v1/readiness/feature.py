"""The base class of features and fixes that follow a batch, and their verbs.

:class:`~vllm.v1.readiness.live.LiveBatch` calls each verb at its moment, in the order of
this file. A verb means the same in every module.
"""

# mirrors: nothing

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import CacheConfig
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class Feature:
    """The base class: each verb does nothing by default."""

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate device memory that may not be free later, before vLLM profiles memory.

        Args:
            cache: states how much of the device's memory vLLM takes.
        """

    def warm_up(self) -> None:
        """Compile kernels and pin memory, which would otherwise stall the first request."""

    def add_request(self, request: "CachedRequestState") -> None:
        """Take in a request that has been given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Let go of a request that is leaving its row.

        Args:
            request: the request, which may come back (preempted, or left out of a step).
            row: its row, which still holds what the request had there.
        """

    def idle(self) -> None:
        """Release what is held for requests: the batch is empty."""

    def move_row(self, source: int, target: int) -> None:
        """Clean up after ``condense`` has moved one row into an empty one."""

    def swap_rows(self, one: int, other: int) -> None:
        """Complete an exchange of two rows by ``swap_states``."""

    def cut(self, req_id: str, length: int) -> None:
        """Follow a cut: the runner is about to drop the end of an output.

        Args:
            req_id: a request in the batch.
            length: number of its output tokens and placeholders that are kept.
        """

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Follow the tokens that a step has sampled, on the device.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; -1 stands for a rejected
                draft, and everything behind a -1 is rejected.
            discarded: [at least requests] bool on the device: rows whose samples are dropped.
        """
