"""Slot mappings of the feature ``block-tables``: none are computed for Mamba groups.

Upstream computes the slot mapping of each KV cache group in every step, by one kernel per group. A
Mamba layer finds its state by the block table, and reads no slots. Other readers of slots are KV
connectors, drafters that use the metadata of the first group, and the capture of routed experts:
with any of these, all slot mappings are computed. Those of a group are computed if third-party
layers or metadata builders may read them.
"""

# mirrors: vllm.v1.worker.block_table:MultiGroupBlockTable.compute_slot_mapping
# mirrors: vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.linear_attn:LinearAttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba1_attn:Mamba1AttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.mamba2_attn:Mamba2AttentionMetadataBuilder
# mirrors: vllm.v1.attention.backends.short_conv_attn:ShortConvAttentionMetadataBuilder
# mirrors: vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose
# mirrors: vllm.v1.spec_decode.ngram_proposer:NgramProposer.propose
# mirrors: vllm.v1.spec_decode.ngram_proposer_gpu:NgramProposerGPU.propose
# mirrors: vllm.v1.spec_decode.suffix_decoding:SuffixDecodingProposer.propose

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.readiness.engine.subclasses import full_name

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_BACKENDS = "vllm.v1.attention.backends."
_DRAFTERS = "vllm.v1.spec_decode."
#: Names of metadata builders that read no slots. Names, because few engines import all classes.
BUILDERS = {
    _BACKENDS + "gdn_attn.GDNAttentionMetadataBuilder",
    _BACKENDS + "linear_attn.LinearAttentionMetadataBuilder",
    _BACKENDS + "mamba1_attn.Mamba1AttentionMetadataBuilder",
    _BACKENDS + "mamba2_attn.Mamba2AttentionMetadataBuilder",
    _BACKENDS + "short_conv_attn.ShortConvAttentionMetadataBuilder",
}
#: Names of drafters that read no slots, or only those of their own KV cache group.
DRAFTERS = {
    "builtins.NoneType",
    _DRAFTERS + "eagle.EagleProposer",
    _DRAFTERS + "ngram_proposer.NgramProposer",
    _DRAFTERS + "ngram_proposer_gpu.NgramProposerGPU",
    _DRAFTERS + "suffix_decoding.SuffixDecodingProposer",
}


def choose(runner: "GPUModelRunner") -> None:
    """Choose the block tables whose slot mappings are computed."""
    others = (
        has_kv_transfer_group()
        or runner.model_config.enable_return_routed_experts
        or full_name(type(getattr(runner, "drafter", None))) not in DRAFTERS
    )
    for group, table in enumerate(runner.input_batch.block_table.block_tables):
        table.maps_slots = others or _may_be_read(runner, group)


def _may_be_read(runner: "GPUModelRunner", group: int) -> bool:
    """Return whether layers, builders or the drafter may read the slot mapping of a group."""
    groups = runner.kv_cache_config.kv_cache_groups
    if group >= len(groups) or type(groups[group].kv_cache_spec) is not MambaSpec:
        return True
    if group == getattr(getattr(runner, "drafter", None), "kv_cache_gid", None):
        return True
    layers = runner.compilation_config.static_forward_context
    return not (
        all(
            full_name(type(builder)) in BUILDERS
            for attention in runner.attn_groups[group]
            for builder in attention.metadata_builders
        )
        and all(
            type(layers.get(name)).__module__.startswith("vllm.model_executor.")
            for name in groups[group].layer_names
        )
    )
