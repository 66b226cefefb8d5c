"""One step of a runner of a hybrid model, upstream's or ours, up to the choice of its CUDA graph.

Real are the input batch, the runner's ``execute_model`` up to there, and the dispatcher.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from support import modules
from support.batches import Spec, empty, state

ROWS = 4
LENGTH = 64
#: Blocks in a cache of states.
BLOCKS = 16
RECURRENT = MambaSpec(block_size=LENGTH, shapes=((2,), (3,)), dtypes=(torch.float32,) * 2)
ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)


class Row(NamedTuple):
    """A request.

    Attributes:
        prompt: length of its prompt.
        computed: how many of its tokens are in its state.
        tokens: how many the step computes.
        drafts: how many of these are drafts.
    """

    prompt: int
    computed: int
    tokens: int = 1
    drafts: int = 0


class _Dispatched(Exception):
    pass


def config(drafts: int) -> Any:
    """Return vLLM's configuration, as far as the runner and the builders read it here."""
    sizes = [rows * (1 + drafts) for rows in (1, 2, ROWS)]
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return SimpleNamespace(
        compilation_config=CompilationConfig(
            mode=0,
            cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            use_ubatching=False,
        ),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        speculative_config=speculative,
        num_speculative_tokens=drafts,
        lora_config=None,
        additional_config=None,
    )


class Step:
    """A step with some requests.

    Args:
        load: modules.pristine or modules.overlaid.
        rows: the requests; the first block of each is its number and one.
        drafts: the most drafts of a request.
        backend: of the recurrent layers.
        spec: of the KV cache, which has one layer.

    Attributes:
        mode: the chosen mode.
        states: the caches of the recurrent layer's two states, full of ones before the step.
    """

    def __init__(
        self,
        load: Callable[[str], Any],
        rows: Sequence[Row],
        drafts: int = 0,
        backend: Any = None,
        spec: KVCacheSpec = RECURRENT,
    ) -> None:
        self.rows = rows
        self.config = config(drafts)
        batch = empty(load, 16, max_num_reqs=ROWS, length=LENGTH, num_spec_tokens=drafts)
        for number, row in enumerate(rows):
            request = state(Spec([1] * row.prompt, [], {}), f"r{number}")
            request.num_computed_tokens = row.computed
            request.block_ids = ([number + 1],)
            batch.add_request(request)
        self.batch = batch
        self.states = [torch.ones(BLOCKS, *shape) for shape in RECURRENT.shapes]
        self._runner = self._prepared(load(modules.RUNNER).GPUModelRunner, drafts, backend, spec)
        tokens = {name: row.tokens for name, row in zip(batch.req_ids, rows, strict=True)}
        scheduled: Any = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_encoder_inputs={},
            scheduled_spec_decode_tokens={},
        )
        try:
            self._runner.execute_model(scheduled)
        except _Dispatched as dispatched:
            (self.mode,) = dispatched.args

    def _prepared(self, kind: Any, drafts: int, backend: Any, spec: KVCacheSpec) -> Any:
        """Return a runner whose inputs are prepared."""
        metadata = None
        if any(row.drafts for row in self.rows):
            ids = [[1] * row.drafts for row in self.rows]
            metadata = SpecDecodeMetadata.make_dummy(ids, torch.device("cpu"))
        dispatcher = CudagraphDispatcher(self.config)
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1 + drafts)
        runner = object.__new__(kind)
        determine = runner._determine_batch_execution_and_padding

        def determined(**arguments: Any) -> None:
            raise _Dispatched(determine(**arguments)[0])

        compilation = SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(kv_cache=self.states)},
            pass_config=SimpleNamespace(enable_sp=False),
        )
        vars(runner).update(
            execute_model_state=None,
            routed_experts_initialized=False,
            vllm_config=self.config,
            compilation_config=compilation,
            cache_config=self.config.cache_config,
            parallel_config=self.config.parallel_config,
            model_config=self.config.model_config,
            speculative_config=None,
            cascade_attn_enabled=False,
            device=torch.device("cpu"),
            pin_memory=False,
            input_batch=self.batch,
            cudagraph_dispatcher=dispatcher,
            uniform_decode_query_len=1 + drafts,
            num_spec_tokens=drafts,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            attn_groups=[[SimpleNamespace(backend=backend)] if backend else []],
            synchronize_input_prep=nullcontext,
            _update_states=lambda _: None,
            _prepare_inputs=lambda *_: (None, metadata),
            _determine_batch_execution_and_padding=determined,
        )
        return runner
