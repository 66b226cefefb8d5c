"""Attention metadata of decode steps whose batch has not changed; see ``step_inputs``.

Upstream builds the common metadata in each step, although it is only views of persistent buffers
plus ``max_seq_len``, which grows by one. Here the common metadata of the first such step is kept,
and passed to the builders of each attention group in every step. Their computation on the device
runs as in upstream.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings
# mirrors: vllm.v1.attention.backend:CommonAttentionMetadata
# mirrors: vllm.v1.attention.backend:AttentionMetadataBuilder

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Part(NamedTuple):
    """One attention group's share of a step's metadata."""

    builder: "AttentionMetadataBuilder[Any]"
    layers: list[str]  # names
    common: "CommonAttentionMetadata"  # for the group's KV cache
    twin: int | None  # index of an earlier part whose metadata differs only in its blocks


class StepMetadata(Feature):
    """Kept metadata of one decoding batch."""

    def __init__(self, batch: "InputBatch") -> None:
        super().__init__(batch)
        #: Number of steps since the batch last changed.
        self._step = 0
        #: Whether a step's inputs are prepared, and its metadata is not built yet.
        self._open = False
        #: The kept slot mappings, and the shape of their step.
        self._slots_shape: object = None
        self._slots: Any = None
        #: Shape and number of the step whose common metadata is kept, by KV cache group.
        #: ``keep_metadata`` appends to it while ``_keeping``.
        self._shape: object = None
        self._kept = 0
        self._common: list[CommonAttentionMetadata] = []
        self._keeping = False
        self._parts: list[Part] = []

    def forget(self) -> None:
        """Drop everything, because the batch has changed."""
        self._open = self._keeping = False
        if self._step:
            self.__init__(self.batch)  # type: ignore[misc]

    def begin_step(self) -> None:
        """Begin a step whose inputs are prepared and whose batch has not changed."""
        self._step += 1
        self._open = True

    def reuse_slots(self, shape: object, split: object) -> tuple[Any, Any] | None:
        """Return a step's slot mappings; None to fall back, always for a step with ubatches."""
        if not self._open or split is not None:
            return None
        return self._slots if shape == self._slots_shape else None

    def keep_slots(self, shape: object, slots: tuple[Any, Any]) -> None:
        """Keep the slot mappings that upstream computed for a step without ubatches."""
        if self._open:
            self._slots_shape, self._slots = shape, slots

    def build_metadata(
        self, runner: "GPUModelRunner", shape: object, *special: object
    ) -> dict[str, Any] | None:
        """Build a step's attention metadata, by layer; see :meth:`Feature.build_metadata`."""
        self._keeping, step, self._open = False, self._open, False
        if not step or any(special):
            return None
        groups = len(runner.kv_cache_config.kv_cache_groups)
        if shape != self._shape or len(self._common) != groups:
            self._shape, self._kept, self._keeping = shape, self._step, _is_plain(runner)
            self._common.clear()
            self._parts.clear()
            return None
        if not self._parts:
            self._divide(runner)
        metadata: dict[str, Any] = {}
        built: list[Any] = []
        for part in self._parts:
            common = copy(part.common)
            common.max_seq_len += self._step - self._kept
            if part.twin is None:
                group = part.builder.build(common_prefix_len=0, common_attn_metadata=common)
            else:
                blocks, slots = common.block_table_tensor, common.slot_mapping
                group = part.builder.update_block_table(built[part.twin], blocks, slots)
            built.append(group)
            metadata.update(dict.fromkeys(part.layers, group))
        return metadata

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep the common metadata that upstream built for a step's next KV cache group."""
        if self._keeping:
            self._common.append(copy(common))

    def _divide(self, runner: "GPUModelRunner") -> None:
        """List the builders that upstream calls, with their common metadata and layers."""
        config = runner.kv_cache_config.kv_cache_groups
        firsts: dict[tuple[object, type], int] = {}
        for number, (common, groups) in enumerate(
            zip(self._common, runner.attn_groups, strict=True)
        ):
            for group in groups:
                builder = group.get_metadata_builder(0)
                spec = config[number].kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[group.layer_names[0]]
                alike = (spec, type(builder))
                shared = builder.supports_update_block_table
                twin = firsts.get(alike) if shared else None
                if shared and twin is None:
                    firsts[alike] = len(self._parts)
                self._parts.append(Part(builder, group.layer_names, common, twin))


def _is_plain(runner: "GPUModelRunner") -> bool:
    """Return whether upstream needs nothing but these builders for a plain step's metadata."""
    return not (
        runner.routed_experts_initialized
        or runner.dcp_world_size > 1
        or runner.cache_config.kv_sharing_fast_prefill
        or runner.is_mm_prefix_lm
        or runner.speculative_config
    )
