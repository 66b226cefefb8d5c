"""Which of upstream's test files are run, and why others are not.

A file belongs here if it imports a module that the overlay patches, or tests what such a module
uses. :func:`check` finds those of the first kind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from overlay.errors import Exit, OverlayError

#: Run wherever an installation runs.
EVERYWHERE = (
    "tests/entrypoints/speech_to_text/transcription/test_transcription_inter_chunk_spacing.py",
    "tests/kernels/mamba/test_mamba_ssm_configs.py",
    "tests/model_executor/test_routed_experts_capture.py",
    "tests/multimodal/test_cache.py",
    "tests/multimodal/test_hasher.py",
    "tests/test_envs.py",
    "tests/test_vllm_port.py",
    "tests/v1/attention/test_attention_backends_selection.py",
    "tests/v1/attention/test_attention_splitting.py",
    "tests/v1/attention/test_mamba_update_block_table.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_kv_cache_metrics.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_repetition_detection.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/engine/test_init_error_messaging.py",
    "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
    "tests/v1/kv_connector/unit/test_decode_bench_connector.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_coordinator.py",
    "tests/v1/kv_connector/unit/test_mooncake_store_hma_e2e.py",
    "tests/v1/kv_connector/unit/test_scheduler_kv_connector_override.py",
    "tests/v1/logits_processors/test_correctness.py",
    "tests/v1/sample/test_batched_count_greater_than.py",
    "tests/v1/sample/test_logprobs.py",
    "tests/v1/sample/test_sampler.py",
    "tests/v1/sample/test_sampling_params_e2e.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/spec_decode/test_backup_token_async_spec.py",
    "tests/v1/spec_decode/test_extract_hidden_states.py",
    "tests/v1/streaming_input/test_gpu_model_runner_streaming.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/structured_output/test_reasoning_structured_output.py",
    "tests/v1/worker/test_gpu_input_batch.py",
    "tests/v1/worker/test_gpu_model_runner.py",
    "tests/v1/worker/test_gpu_model_runner_v2_eplb.py",
)
#: Fail or skip without a GPU, but for a test or two: Triton has no kernels there.
ON_A_GPU = (
    "tests/kernels/mamba/test_causal_conv1d.py",
    "tests/kernels/mamba/test_mamba_mixer2.py",
    "tests/kernels/mamba/test_mamba_ssm.py",
    "tests/kernels/mamba/test_mamba_ssm_ssd.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_worker.py",
    "tests/v1/sample/test_rejection_sampler.py",
    "tests/v1/sample/test_topk_topp_sampler.py",
    "tests/v1/streaming_input/test_gpu_model_runner_v2_streaming.py",
)

_SETTING = "reads a setting of vllm.envs, and tests nothing that the overlay changes"
_SEVERAL = "needs several GPUs"
_DOWNLOAD = "needs the download of a model"
_RAY = "needs Ray"
_ASYNCIO = "needs pytest-asyncio"
_CONTEXTS = "leaves ZeroMQ contexts behind, which may hang the process as they are collected"
_MOCK = "puts a mock in place of AsyncLLM"
_PLUGIN = "needs upstream's example plugins installed"
#: Test file to the reason why it is not run.
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "tests/compile/h100/test_startup.py": _DOWNLOAD,
        "tests/compile/passes/distributed/test_async_tp.py": _SEVERAL,
        "tests/compile/passes/distributed/test_fusion_all_reduce.py": _SEVERAL,
        "tests/compile/passes/distributed/test_sequence_parallelism.py": _SEVERAL,
        "tests/compile/passes/test_fusion.py": _SETTING,
        "tests/compile/passes/test_silu_mul_quant_fusion.py": _SETTING,
        "tests/compile/test_aot_compile.py": _SETTING,
        "tests/compile/test_config.py": _SETTING,
        "tests/compile/test_rotary_embedding_compile.py": _SETTING,
        "tests/config/test_config_generation.py": _DOWNLOAD,
        "tests/config/test_mp_reducer.py": _DOWNLOAD,
        "tests/distributed/test_comm_ops.py": _RAY,
        "tests/distributed/test_mq_connect_ip.py": _CONTEXTS,
        "tests/distributed/test_nccl_symm_mem_allreduce.py": _SEVERAL,
        "tests/distributed/test_quick_all_reduce.py": _SEVERAL,
        "tests/distributed/test_ray_v2_executor_e2e.py": _RAY,
        "tests/distributed/test_shm_broadcast.py": _CONTEXTS,
        "tests/distributed/test_symm_mem_allreduce.py": _SEVERAL,
        "tests/distributed/test_utils.py": _SETTING,
        "tests/entrypoints/llm/test_mm_cache_external_injection.py": _DOWNLOAD,
        "tests/entrypoints/llm/test_mm_cache_stats.py": _DOWNLOAD,
        "tests/entrypoints/openai/chat_completion/test_chat.py": _DOWNLOAD,
        "tests/entrypoints/openai/chat_completion/test_chat_error.py": _MOCK,
        "tests/entrypoints/openai/chat_completion/test_serving_chat.py": _MOCK,
        "tests/entrypoints/openai/completion/test_completion_error.py": _MOCK,
        "tests/entrypoints/openai/completion/test_lora_resolvers.py": _MOCK,
        "tests/entrypoints/openai/generative_scoring/test_generative_scoring.py": _MOCK,
        "tests/entrypoints/openai/responses/test_errors.py": _SETTING,
        "tests/entrypoints/openai/responses/test_serving_responses.py": _SETTING,
        "tests/entrypoints/serve/disagg/test_generate_stream.py": _MOCK,
        "tests/entrypoints/serve/lora/test_serving_models.py": _ASYNCIO,
        "tests/entrypoints/serve/tokenize/test_serving_tokenization.py": _MOCK,
        "tests/kernels/moe/test_grouped_topk.py": _SETTING,
        "tests/kernels/moe/test_routing_simulator.py": _SETTING,
        "tests/lora/test_add_lora.py": _DOWNLOAD,
        "tests/lora/test_chatglm3_tp.py": _SEVERAL,
        "tests/lora/test_deepseekv2_tp.py": _SEVERAL,
        "tests/lora/test_default_mm_loras.py": _DOWNLOAD,
        "tests/lora/test_gptoss_tp.py": _SEVERAL,
        "tests/lora/test_llama_tp.py": _SEVERAL,
        "tests/lora/test_lora_functions.py": _DOWNLOAD,
        "tests/lora/test_lora_manager.py": _DOWNLOAD,
        "tests/lora/test_minicpmv_tp.py": _SEVERAL,
        "tests/lora/test_mixtral.py": _DOWNLOAD,
        "tests/lora/test_olmoe_tp.py": _SEVERAL,
        "tests/lora/test_quant_model.py": _DOWNLOAD,
        "tests/lora/test_qwen35_densemodel_lora.py": _DOWNLOAD,
        "tests/lora/test_qwen36_moe_lora.py": _DOWNLOAD,
        "tests/lora/test_qwen3_unembed.py": _DOWNLOAD,
        "tests/lora/test_qwen3_with_multi_loras.py": _DOWNLOAD,
        "tests/lora/test_qwen3moe_tp.py": _SEVERAL,
        "tests/lora/test_qwenvl.py": _DOWNLOAD,
        "tests/lora/test_resolver.py": _RAY,
        "tests/lora/test_transformers_model.py": _DOWNLOAD,
        "tests/lora/test_whisper.py": _DOWNLOAD,
        "tests/lora/test_worker.py": _DOWNLOAD,
        "tests/models/multimodal/generation/test_granite_speech.py": _DOWNLOAD,
        "tests/models/multimodal/generation/test_maverick.py": _DOWNLOAD,
        "tests/models/multimodal/generation/test_phi4mm.py": _DOWNLOAD,
        "tests/models/multimodal/generation/test_voxtral_realtime.py": _DOWNLOAD,
        "tests/models/multimodal/processing/test_audio_in_video.py": _DOWNLOAD,
        "tests/models/multimodal/processing/test_common.py": _DOWNLOAD,
        "tests/models/test_initialization.py": _DOWNLOAD,
        "tests/plugins_tests/test_platform_plugins.py": _PLUGIN,
        "tests/plugins_tests/test_scheduler_plugins.py": _DOWNLOAD,
        "tests/plugins_tests/test_stats_logger_plugins.py": _DOWNLOAD,
        "tests/test_config.py": _SETTING,
        "tests/v1/attention/test_rocm_attention_backends_selection.py": "needs ROCm",
        "tests/v1/core/test_priority_scheduler_random.py": _DOWNLOAD,
        "tests/v1/determinism/test_batch_invariance.py": _DOWNLOAD,
        "tests/v1/determinism/test_cutlass_batch_invariance.py": _SETTING,
        "tests/v1/distributed/test_async_llm_dp.py": _SEVERAL,
        "tests/v1/distributed/test_eagle_dp.py": _SEVERAL,
        "tests/v1/e2e/general/test_mamba_prefix_cache.py": _DOWNLOAD,
        "tests/v1/e2e/general/test_streaming_input.py": _DOWNLOAD,
        "tests/v1/e2e/spec_decode/test_lora_with_spec_decode.py": _DOWNLOAD,
        "tests/v1/engine/test_abort_final_step.py": _DOWNLOAD,
        "tests/v1/engine/test_async_llm.py": _DOWNLOAD,
        "tests/v1/engine/test_core_engine_actor_manager.py": _RAY,
        "tests/v1/engine/test_engine_core.py": _DOWNLOAD,
        "tests/v1/engine/test_engine_core_client.py": _DOWNLOAD,
        "tests/v1/engine/test_output_processor.py": _DOWNLOAD,
        "tests/v1/engine/test_preprocess_error_handling.py": _DOWNLOAD,
        "tests/v1/executor/test_executor.py": _DOWNLOAD,
        "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py": _DOWNLOAD,
        "tests/v1/kv_connector/unit/test_nixl_connector.py": _RAY,
        "tests/v1/kv_connector/unit/test_nixl_connector_hma.py": _DOWNLOAD,
        "tests/v1/metrics/test_engine_logger_apis.py": _DOWNLOAD,
        "tests/v1/metrics/test_ray_metrics.py": _RAY,
        "tests/v1/sample/test_logprobs_e2e.py": _DOWNLOAD,
        "tests/v1/shutdown/test_delete.py": _DOWNLOAD,
        "tests/v1/shutdown/test_forward_error.py": _DOWNLOAD,
        "tests/v1/shutdown/test_processor_error.py": _DOWNLOAD,
        "tests/v1/shutdown/test_startup_error.py": _DOWNLOAD,
        "tests/v1/spec_decode/test_eagle.py": _DOWNLOAD,
        "tests/v1/streaming_input/test_async_llm_streaming.py": _ASYNCIO,
        "tests/v1/structured_output/test_backend_guidance.py": _DOWNLOAD,
        "tests/v1/worker/test_worker_memory_snapshot.py": _SEVERAL,
    }
)

#: Test that asserts what a fix mends, to the fix. It passes on stock alone.
MENDED: Mapping[str, str] = MappingProxyType(
    {
        # An image with an id of its own is the same item as the id's bytes.
        "tests.multimodal.test_hasher::test_hash_image_exif_id": "cache-keys",
        # Reasoning has ended after whichever token; its grammar begins at the step's first.
        "tests.v1.structured_output.test_reasoning_structured_output.TestReasoningStructuredOutput"
        "::test_should_advance_reasoning_just_ended_with_spec_decode_structural_tag": (
            "closed-grammars"
        ),
    }
)

#: Patched module that most tests import for other things, to the names that the overlay changes.
CHANGED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"vllm.utils.torch_utils": ("async_tensor_h2d",)}
)


def differences(source: Path, patched: Sequence[str]) -> tuple[set[str], set[str]]:
    """Test files that import a patched module and are not listed, and listed ones that are missing.

    Args:
        source: the unpacked archive.
        patched: upstream's files that the overlay changes, as paths below site-packages.
    """
    modules = {name for path in patched for name in _names(_module(path))}
    importing = {
        str(path.relative_to(source))
        for path in (source / "tests").rglob("test_*.py")
        if not modules.isdisjoint(_imports(path))
    }
    listed = {*EVERYWHERE, *ON_A_GPU, *LEFT_OUT}
    missing = {name for name in listed if not (source / name).is_file()}
    return importing - listed, missing


def check(source: Path, patched: Sequence[str]) -> None:
    """Refuse a source archive that these lists do not fit; see :func:`differences`.

    Raises:
        OverlayError: a test file imports a patched module and is not listed, or one that is
            listed does not exist.
    """
    importing, missing = differences(source, patched)
    for names, problem in (
        (importing, "import patched modules and are not listed"),
        (missing, "are listed and do not exist"),
    ):
        if names:
            raise OverlayError(
                Exit.FAULT,
                f"test files {problem}: {', '.join(sorted(names))}",
                subject=source,
                next_step="decide on each one in scripts/conformance/selection.py",
            )


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _names(module: str) -> Iterator[str]:
    """Yield the names by which a test may import a change from a patched module."""
    if module not in CHANGED:
        yield module
    for name in CHANGED.get(module, ()):
        yield f"{module}.{name}"


def _imports(path: Path) -> Iterator[str]:
    """The modules, and names that may be modules, that a file imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
