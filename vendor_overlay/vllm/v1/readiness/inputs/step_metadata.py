"""Attention metadata of decode steps whose batch has not changed; see ``step_inputs``.

Upstream describes the batch anew for each step, though the description holds views of buffers
that stay, and the length of the longest sequence, which grows by one. Here the description of
the first such step is kept. The builders of each attention group are called with it as
upstream calls them, so that what they compute on the device is computed in every step.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings
# mirrors: vllm.v1.attention.backend:CommonAttentionMetadata
# mirrors: vllm.v1.attention.backend:AttentionMetadataBuilder

from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Part:
    """One attention group's share of a step's metadata.

    Attributes:
        builder: the group's.
        layers: names of its layers.
        common: the description of the batch for the group's KV cache.
        twin: number of an earlier part whose metadata differs in its blocks alone; None if
            there is none.
    """

    __slots__ = ("builder", "common", "layers", "twin")

    def __init__(
        self,
        builder: "AttentionMetadataBuilder[Any]",
        layers: list[str],
        common: "CommonAttentionMetadata",
        twin: int | None,
    ) -> None:
        self.builder = builder
        self.layers = layers
        self.common = common
        self.twin = twin


class StepMetadata:
    """What is kept of the metadata of one batch that decodes."""

    def __init__(self) -> None:
        #: Number of this step among those since the batch has changed.
        self._step = 0
        #: Whether a step's inputs are prepared, and its metadata is not built yet.
        self._open = False
        #: Of the kept slot mappings, and the slot mappings.
        self._slots_shape: object = None
        self._slots: Any = None
        #: Of the kept description; the step in which it was made; for each KV cache group,
        #: the description, to which ``keep`` adds if it is being made.
        self._shape: object = None
        self._kept = 0
        self._common: list[CommonAttentionMetadata] = []
        self._keeping = False
        self._parts: list[Part] = []

    def forget(self) -> None:
        """Forget the batch: it has changed."""
        self._open = self._keeping = False
        if self._step:
            self.__init__()  # type: ignore[misc]

    def begin_step(self) -> None:
        """Note that the inputs of a step are prepared, whose batch has not changed."""
        self._step += 1
        self._open = True

    def reuse_slots(self, shape: object, split: object) -> tuple[Any, Any] | None:
        """Return the slot mappings of a step; None to fall back to upstream.

        Args:
            shape: of the step.
            split: how the step is split in two, if it is.
        """
        if not self._open or split is not None:
            return None
        return self._slots if shape == self._slots_shape else None

    def keep_slots(self, shape: object, slots: tuple[Any, Any]) -> None:
        """Keep the slot mappings that upstream has made of a step that is not split."""
        if self._open:
            self._slots_shape, self._slots = shape, slots

    def build(
        self, runner: "GPUModelRunner", shape: object, *special: object
    ) -> dict[str, Any] | None:
        """Build the attention metadata of a step.

        Args:
            runner: the runner.
            shape: of the step: what the description depends on, beside the batch.
            special: what makes a step upstream's; each is None or False in a plain one.

        Returns:
            Metadata of each layer; None to fall back to upstream.
        """
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
        made: list[Any] = []
        for part in self._parts:
            common = copy(part.common)
            common.max_seq_len += self._step - self._kept
            if part.twin is None:
                one = part.builder.build(common_prefix_len=0, common_attn_metadata=common)
            else:
                blocks, slots = common.block_table_tensor, common.slot_mapping
                one = part.builder.update_block_table(made[part.twin], blocks, slots)
            made.append(one)
            metadata.update(dict.fromkeys(part.layers, one))
        return metadata

    def keep(self, common: "CommonAttentionMetadata") -> None:
        """Keep upstream's description of a step for the next KV cache group."""
        if self._keeping:
            self._common.append(copy(common))

    def _divide(self, runner: "GPUModelRunner") -> None:
        """Find out which builders upstream calls, with what, for which layers."""
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
    """Whether upstream does nothing else for a step's metadata, of a plain step."""
    return not (
        runner.routed_experts_initialized
        or runner.dcp_world_size > 1
        or runner.cache_config.kv_sharing_fast_prefill
        or runner.is_mm_prefix_lm
        or runner.speculative_config
    )
