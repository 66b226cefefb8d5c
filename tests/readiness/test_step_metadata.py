"""Attention metadata of steps with as many requests as an earlier step."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
from support.scheduling import make_scheduler
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.readiness import worker
from vllm.v1.utils import CpuGpuBuffer

TOKENS = 512
GROUPS = ("one", "other")
CPU = torch.device("cpu")


def buffer(size: int, dtype: torch.dtype = torch.int32) -> CpuGpuBuffer:
    """A buffer as the runner has them, whose copy on the device is the host's."""
    made = CpuGpuBuffer(size, dtype=dtype, device=CPU, pin_memory=False)
    made.gpu = made.cpu
    return made


class Runner:
    """A runner with two groups of recurrent layers, and the metadata of its steps."""

    def __init__(
        self, load: Any, rows: int, kind: Any = GDNAttentionMetadataBuilder, mode: str = "none"
    ) -> None:
        config = make_scheduler(False, None, 60, rows, TOKENS, TOKENS).vllm_config
        config.cache_config.mamba_cache_mode = mode
        config.model_config.get_mamba_chunk_size = lambda: 8
        shapes = ((16, 64), (2, 3))
        spec = MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.float16,) * 2)
        builders = [kind(spec, [name], config, CPU) for name in GROUPS]
        for builder in builders:  # as with CUDA graphs of decodes
            builder.use_full_cuda_graph = True
            builder.decode_cudagraph_max_bs = rows
        self.batch = empty(load, 37, length=TOKENS, max_num_reqs=rows)
        fill(self.batch, [Spec([1] * 400, [], {}) for _ in range(rows)])
        table = self.batch.block_table[0]
        table.block_table.gpu = table.block_table.cpu
        self.batch.block_table.block_tables.append(table)
        self.runner = object.__new__(load(modules.RUNNER).GPUModelRunner)
        groups = [
            SimpleNamespace(
                get_metadata_builder=lambda _, builder=builder: builder,
                layer_names=[name],
                kv_cache_spec=spec,
            )
            for name, builder in zip(GROUPS, builders, strict=True)
        ]
        vars(self.runner).update(
            input_batch=self.batch,
            device=CPU,
            speculative_config=None,
            model_config=config.model_config,
            cache_config=config.cache_config,
            parallel_config=config.parallel_config,
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[
                    SimpleNamespace(kv_cache_spec=spec, layer_names=[name]) for name in GROUPS
                ]
            ),
            attn_groups=[[group] for group in groups],
            optimistic_seq_lens_cpu=torch.zeros(rows, dtype=torch.int32),
            seq_lens=torch.zeros(rows, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
            query_start_loc=buffer(rows + 1),
            use_async_spec_decode=False,
            routed_experts_initialized=False,
            dcp_world_size=1,
            is_mm_prefix_lm=False,
        )

    def step(self, lengths: list[int], padded: int | None = None, ours: bool = True) -> Any:
        """Build the metadata of a step of prompts' chunks, or of decodes; by layer.

        Without ``ours`` it is a dummy run's, which upstream prepares.
        """
        runner, count = self.runner, len(lengths)
        rows = padded or count
        runner.query_start_loc.np[1:] = sum(lengths)
        runner.query_start_loc.np[1 : count + 1] = np.cumsum(lengths)
        runner.seq_lens[:count] = torch.tensor(lengths, dtype=torch.int32)
        runner.optimistic_seq_lens_cpu[:] = runner.seq_lens
        total = padded or sum(lengths)
        slots = {number: torch.zeros(total, dtype=torch.int64) for number in range(len(GROUPS))}
        if ours and hasattr(self.batch, "readiness"):
            metadata = worker.of(self.batch).step_metadata
            assert metadata is not None
            metadata.inputs_prepared()
            made = metadata.slot_mappings(runner, total, None)
            assert made is not None
            slots, _ = made
        built, _ = runner._build_attention_metadata(
            num_tokens=sum(lengths),
            num_reqs=count,
            max_query_len=max(lengths),
            num_tokens_padded=total,
            num_reqs_padded=rows,
            num_scheduled_tokens={f"r{row}": length for row, length in enumerate(lengths)},
            slot_mappings=slots,
        )
        return built


@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_are_those_of_the_step(rows: int) -> None:
    """Gated delta nets compute only the chunks of 64 tokens that the metadata lists."""
    stock, ours = (Runner(load, rows) for load in (modules.pristine, modules.overlaid))
    for longest in (70, 3, 130, 65, 129):
        lengths = [longest, 5, 4][:rows]
        right, built = stock.step(lengths), ours.step(lengths)
        for name in GROUPS:
            assert built[name].chunk_indices.tolist() == right[name].chunk_indices.tolist()
            assert built[name].chunk_offsets.tolist() == right[name].chunk_offsets.tolist()
            assert built[name].batch_ptr.tolist() == right[name].batch_ptr.tolist()
        starts = [built[name].non_spec_query_start_loc for name in GROUPS]
        assert starts[0] is starts[1]  # so that a step's results are cached


def _shown(metadata: Any) -> dict[str, Any]:
    """Return the fields of metadata, with lists for tensors."""
    return {
        name: value.tolist() if torch.is_tensor(value) else value
        for name, value in vars(metadata).items()
        if name != "nums_dict"
    }


def _computed(runner: Runner, tokens: int) -> None:
    """Say how many tokens of each request have states; its prompt has 400."""
    runner.batch.num_computed_tokens_cpu[:] = tokens


def _changed(runner: Runner) -> None:
    """Put other requests into the batch."""
    runner.batch.block_table[0].block_table.np[:] += 1
    runner.batch.sampling_metadata = copy(runner.batch.sampling_metadata)


@pytest.mark.parametrize("padded", [3, 4], ids=["full", "padded"])
@pytest.mark.parametrize(
    "kind",
    [GDNAttentionMetadataBuilder, Mamba2AttentionMetadataBuilder, Mamba1AttentionMetadataBuilder],
)
def test_decodes_of_the_same_rows_keep_their_metadata(kind: Any, padded: int) -> None:
    stock, ours = (Runner(load, 4, kind) for load in (modules.pristine, modules.overlaid))

    def step(lengths: list[int], **given: Any) -> Any:
        right, built = stock.step(lengths, **given), ours.step(lengths, **given)
        for name in GROUPS:
            assert _shown(built[name]) == _shown(right[name])
        return built

    def decode(count: int = 3) -> Any:
        return step([1] * count, padded=padded)

    for runner in (stock, ours):
        _computed(runner, 401)
    decode()
    first = decode()
    assert all(decode()[name] is first[name] for name in GROUPS)
    for runner in (stock, ours):
        _changed(runner)
    second = decode()
    assert all(second[name] is not first[name] for name in GROUPS)
    assert decode()["one"] is second["one"]
    step([1] * 2, padded=padded, ours=False)  # in the builder's buffers, too
    third = decode()
    assert third["one"] is not second["one"]
    decode(2)
    fourth = decode()
    assert fourth["one"] is not third["one"]
    for runner in (stock, ours):
        _computed(runner, 399)  # the last token of a prompt
    fifth = decode()
    for runner in (stock, ours):
        _computed(runner, 400)
    assert decode()["one"] is not fifth["one"]


def test_decodes_whose_states_move_are_built() -> None:
    ours = Runner(modules.overlaid, 4, Mamba2AttentionMetadataBuilder, mode="align")
    _computed(ours, 401)
    built = [ours.step([1] * 3) for _ in range(3)]
    assert built[1]["one"] is not built[2]["one"]
