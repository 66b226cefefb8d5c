"""The feature block-tables: no slots are computed for recurrent layers, which never read them."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.batches import empty
from support.hybrid_step import ATTENTION, RECURRENT
from support.sites import UPSTREAM
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import slot_mappings
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

LAYERS = ["attention", "recurrent"]


def named(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind)


def new(kind: type) -> Any:
    return object.__new__(kind)


@pytest.fixture
def runner() -> Any:
    """Our runner with an attention group and a recurrent group, before its KV cache is made."""
    module = modules.overlaid(modules.RUNNER)
    runner = new(module.GPUModelRunner)
    batch = empty(modules.overlaid, 16)
    wide = modules.overlaid(modules.BLOCK_TABLE).MultiGroupBlockTable(
        *(8, 64, 64, False, torch.device("cpu")), block_sizes=[16, 64], kernel_block_sizes=[16, 64]
    )
    batch.block_table = wide
    layers = {"attention": None, "recurrent": new(MambaMixer2)}
    vars(runner).update(
        input_batch=batch,
        vllm_config=SimpleNamespace(mamba_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(enable_return_routed_experts=False),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        attn_groups=[[], [SimpleNamespace(metadata_builders=[new(GDNAttentionMetadataBuilder)])]],
        initialize_kv_cache_tensors=lambda *_: {},
    )
    for method in (
        *("may_add_encoder_only_layers_to_kv_cache_config", "initialize_attn_backend"),
        *("maybe_add_kv_sharing_layers_to_kv_cache_groups", "initialize_metadata_builders"),
        "may_reinitialize_input_batch",
    ):
        setattr(runner, method, lambda *_, **__: None)
    return runner


def mapped(runner: Any, spec: MambaSpec = RECURRENT) -> list[bool]:
    """Whether each group's slots are computed, by a step of a runner that has made its cache."""
    groups = [
        KVCacheGroupSpec([layer], each)
        for layer, each in zip(LAYERS, (ATTENTION, spec), strict=True)
    ]
    tables = runner.input_batch.block_table
    module = modules.overlaid(modules.RUNNER)
    with (
        mock.patch.object(module, "initialize_mamba_ssu_backend"),
        mock.patch.object(module, "prepare_kernel_block_sizes"),
    ):
        runner.initialize_kv_cache(KVCacheConfig(4, [], groups))
    with launches() as slots:
        tables.compute_slot_mapping(1, torch.zeros(2, dtype=torch.int32), torch.zeros(1))
    return [any(table.slot_mapping.gpu is each for each in slots) for table in tables.block_tables]


@contextmanager
def launches() -> Iterator[list[torch.Tensor]]:
    """The slots that the kernel is launched for."""
    slots: list[torch.Tensor] = []

    class Kernel:
        def __getitem__(self, _: Any) -> Any:
            return lambda *arguments, **_: slots.append(arguments[7])

    name = "_compute_slot_mapping_kernel"
    with mock.patch.object(modules.overlaid(modules.BLOCK_TABLE), name, Kernel()):
        yield slots


@pytest.mark.parametrize("kind", sorted(slot_mappings.DRAFTERS))
def test_slots_of_recurrent_layers_are_not_computed(runner: Any, kind: str) -> None:
    """Without a drafter, or with one that reads no slots."""
    if not kind.startswith("builtins."):
        runner.drafter = new(named(kind))
    assert mapped(runner) == [True, False]


def test_slots_that_may_be_read_are_computed(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.drafter = new(DraftModelProposer)  # it reads the first group's, whatever that is
    assert mapped(runner) == [True, True]
    runner.drafter = new(EagleProposer)
    runner.drafter.kv_cache_gid = 1
    assert mapped(runner) == [True, True]
    runner.drafter.kv_cache_gid = 0
    assert mapped(runner) == [True, False]

    own = type("Own", (MambaSpec,), {})(**vars(RECURRENT))
    assert mapped(runner, own) == [True, True]
    builders = runner.attn_groups[1][0].metadata_builders
    builders.append(new(type("Own", (GDNAttentionMetadataBuilder,), {})))
    assert mapped(runner) == [True, True]
    del builders[1]
    layers = runner.compilation_config.static_forward_context
    layers["recurrent"] = new(type("Own", (MambaMixer2,), {}))
    assert mapped(runner) == [True, True]
    layers["recurrent"] = new(MambaMixer2)
    assert mapped(runner) == [True, False]

    runner.model_config.enable_return_routed_experts = True
    assert mapped(runner) == [True, True]
    runner.model_config.enable_return_routed_experts = False
    monkeypatch.setattr(slot_mappings, "has_kv_transfer_group", lambda: True)
    assert mapped(runner) == [True, True]


def test_with_the_feature_off_all_slots_are_computed(runner: Any) -> None:
    with mock.patch.dict(os.environ, {switch.NAME: "-block-tables"}):
        batch = empty(modules.overlaid, 16)
    batch.block_table = runner.input_batch.block_table
    runner.input_batch = batch
    assert mapped(runner) == [True, True]


@pytest.mark.parametrize("name", sorted(slot_mappings.BUILDERS))
def test_the_pinned_builders_read_no_slots(name: str) -> None:
    """Nor do those that they are derived from, up to the one of all backends."""
    builder = named(name)
    ours = builder.__mro__[: builder.__mro__.index(AttentionMetadataBuilder)]
    assert not any(".slot_mapping" in inspect.getsource(kind) for kind in ours)


def test_the_pinned_recurrent_layers_read_no_slots() -> None:
    files = [file.read_text() for file in Path(UPSTREAM, "vllm/model_executor").rglob("*.py")]
    recurrent = [text for text in files if "(MambaBase" in text or ", MambaBase" in text]
    assert len(recurrent) > 5
    assert not any("slot_mapping" in text for text in recurrent)


def test_a_device_that_was_asleep_is_sent_whole_tables(runner: Any) -> None:
    runner.init_fp8_kv_scales = lambda: None
    tables = runner.input_batch.readiness.block_tables
    with mock.patch.object(tables, "lose") as lose:
        runner.post_kv_cache_wake_up()
    lose.assert_called_once_with()
