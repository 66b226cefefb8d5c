"""Attention metadata of the steps that ``step_inputs`` prepares.

Upstream creates about fifteen views of persistent buffers per step and KV cache group. Nearly all
of them depend only on the number of requests. Here upstream's common metadata is kept, by number of
requests. A later step with this number copies it, and sets only the fields that depend on the
tokens. The builders of the attention groups run as they do upstream. The metadata of a recurrent
layer's decodes does not depend on tokens: in a step of the same decodes as the step before it is
kept as a whole.

The groups of a step share the tensor objects of ``query_start_loc``, and no other step has them:
the kernels of gated delta nets cache results by the identity of these objects.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings
# mirrors: vllm.v1.attention.backend:CommonAttentionMetadata
# mirrors: vllm.v1.attention.backend:AttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba1_attn:Mamba1AttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder
# mirrors: vllm.model_executor.layers.fla.ops.utils:tensor_cache

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Block id of padding rows.
_NULL_BLOCK = 0


class Part(NamedTuple):
    """An attention group of the runner."""

    builder: "AttentionMetadataBuilder[Any]"
    layers: list[str]  # names
    cache: int  # index of the group's KV cache group
    twin: int | None  # index of an earlier part whose metadata differs only in block ids and slots
    keeps: bool  # whether its metadata of decodes depends only on the rows


class Decodes(NamedTuple):
    """A step of decodes of one token each.

    Attributes:
        metadata: the batch's sampling metadata, which is replaced when a row changes.
        sizes: numbers of tokens and rows, with padding, and of requests.
        built: metadata of each part.
    """

    metadata: "SamplingMetadata"
    sizes: tuple[int, int, int]
    built: list[Any]


class StepMetadata:
    """Builds attention metadata from the common metadata of earlier steps.

    In a step, :meth:`StepInputs.prepare` calls :meth:`inputs_prepared`, and upstream's runner then
    :meth:`slot_mappings` and :meth:`build`, which uses those mappings. If :meth:`build` returns
    None, upstream builds the metadata, and :meth:`keep` gets it for later steps.
    """

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch
        #: Whether ``step_inputs`` has prepared a step whose metadata is not built yet.
        self._open = False
        #: The step's slot mappings by KV cache group, if :meth:`slot_mappings` returned them.
        self._slots: dict[int, torch.Tensor] | None = None
        #: The runner's attention groups, for which the attributes below were created.
        self._attention: object = None
        self._plain = False
        self._parts: list[Part] = []
        #: Common metadata of each KV cache group, by number of requests with padding.
        self._common: dict[int, list[CommonAttentionMetadata]] = {}
        #: The step before, if the next may be of the same decodes.
        self._decodes: Decodes | None = None
        #: The entry of ``_common`` that ``keep`` appends to, or None.
        self._keeping: list[CommonAttentionMetadata] | None = None

    def forget_step(self) -> None:
        """Leave the metadata of the current step to upstream."""
        self._open, self._slots, self._keeping = False, None, None
        self._decodes = None

    def lose_block_tables(self) -> None:
        """Mark all views of the block tables as stale; the next step rebuilds them."""
        self.forget_step()
        self._attention = None

    def inputs_prepared(self) -> None:
        """Begin a step, whose inputs ``step_inputs`` has prepared."""
        self._open, self._slots = True, None

    def slot_mappings(
        self, runner: "GPUModelRunner", padded: int, split: object
    ) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return views of the slot mappings, which ``step_inputs`` has computed and padded.

        Those of groups whose mappings nothing reads are not computed.
        """
        if not self._open or split is not None:
            return None
        tables = runner.input_batch.block_table.block_tables
        by_group: dict[int, torch.Tensor] = {}
        by_layer: dict[str, torch.Tensor] = {}
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            by_group[number] = slots = tables[number].slot_mapping.gpu[:padded]
            by_layer.update(dict.fromkeys(group.layer_names, slots))
        self._slots = by_group
        return by_group, by_layer

    def build(
        self,
        runner: "GPUModelRunner",
        shape: tuple[int, int, int, int | None, int | None],
        *special: object,
    ) -> dict[str, Any] | None:
        """Build a step's attention metadata, by layer; None to fall back to upstream.

        ``shape`` is the number of tokens, the number of requests, ``max_query_len``, and the
        numbers of tokens and requests with padding (None without padding). ``special`` holds
        upstream's other arguments, such as ubatch slices; each is None or False in a plain step.
        """
        step, self._open, self._keeping = self._open, False, None
        slots, self._slots = self._slots, None
        before, self._decodes = self._decodes, None
        if not step or slots is None or any(special) or not self._is_plain(runner):
            return None
        tokens, count, longest, padded_tokens, padded_count = shape
        tokens, rows = padded_tokens or tokens, padded_count or count
        kept = self._common.get(rows)
        if kept is None or len(kept) != len(slots):
            self._common[rows] = self._keeping = []
            return None
        batch = self.batch
        max_seq_len = int(runner.optimistic_seq_lens_cpu.numpy()[:count].max())
        prefilling = (
            batch.num_computed_tokens_cpu_tensor[:rows] < batch.num_prompt_tokens_cpu_tensor[:rows]
        )
        prefilling[count:] = False
        # A template's block_table_tensor is a view of the table that BlockTables keeps up to date.
        positions = runner.positions[:tokens]
        starts, starts_cpu = kept[0].query_start_loc[:], kept[0].query_start_loc_cpu[:]
        commons = []
        for number, template in enumerate(kept):
            common = copy(template)
            common.query_start_loc, common.query_start_loc_cpu = starts, starts_cpu
            common.num_actual_tokens = tokens
            common.max_query_len = longest
            common.max_seq_len = max_seq_len
            common.is_prefilling = prefilling
            common.positions = positions
            common.slot_mapping = slots[number]
            if rows > count:
                common.block_table_tensor[count:].fill_(_NULL_BLOCK)
            commons.append(common)
        metadata: dict[str, Any] = {}
        built: list[Any] = []
        same: list[Any] | None = None
        if any(part.keeps for part in self._parts) and longest == 1 and not prefilling.any():
            self._decodes = Decodes(batch.sampling_metadata, (tokens, rows, count), built)
            if before is not None and before.metadata is batch.sampling_metadata:
                same = before.built if before.sizes == self._decodes.sizes else None
        for part in self._parts:
            common = commons[part.cache]
            if part.keeps and same is not None:
                group = same[len(built)]
            elif part.twin is None:
                group = part.builder.build(common_prefix_len=0, common_attn_metadata=common)
            else:
                blocks, mapping = common.block_table_tensor, common.slot_mapping
                group = part.builder.update_block_table(built[part.twin], blocks, mapping)
            built.append(group)
            metadata.update(dict.fromkeys(part.layers, group))
        return metadata

    def keep(self, common: "CommonAttentionMetadata") -> None:
        """Keep the common metadata that upstream built. Called per KV cache group, in order."""
        if self._keeping is not None:
            self._keeping.append(copy(common))

    def _is_plain(self, runner: "GPUModelRunner") -> bool:
        """Return whether upstream only calls the builders; update the parts if groups changed."""
        if runner.attn_groups is not self._attention:
            self._attention = runner.attn_groups
            self._common.clear()
            self._parts = _divide(runner)
            self._plain = not (
                runner.routed_experts_initialized
                or runner.dcp_world_size > 1
                or runner.cache_config.kv_sharing_fast_prefill
                or runner.is_mm_prefix_lm
                or runner.speculative_config
            )
        return self._plain


def _divide(runner: "GPUModelRunner") -> list[Part]:
    """Return the parts in the order in which upstream calls their builders."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder

    recurrent = (
        GDNAttentionMetadataBuilder,
        Mamba1AttentionMetadataBuilder,
        Mamba2AttentionMetadataBuilder,
    )
    # Otherwise a request's states move to other blocks.
    alone = runner.cache_config.mamba_cache_mode == "none"
    config = runner.kv_cache_config.kv_cache_groups
    parts: list[Part] = []
    firsts: dict[tuple[object, type], int] = {}
    for number, groups in enumerate(runner.attn_groups):
        for group in groups:
            builder = group.get_metadata_builder(0)
            spec = config[number].kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[group.layer_names[0]]
            alike = (spec, type(builder))
            shared = builder.supports_update_block_table
            twin = firsts.get(alike) if shared else None
            if shared and twin is None:
                firsts[alike] = len(parts)
            keeps = alone and type(builder) in recurrent
            parts.append(Part(builder, group.layer_names, number, twin, keeps))
    return parts
