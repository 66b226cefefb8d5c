"""The feature mamba-launches: a step's layers repeat the first one's launches, or are upstream's.

Triton launches nothing without a GPU, so kernels that add up what they read stand for Triton's,
and a layer that launches them for upstream's. With real ones: tests/gpu/test_mamba_launches.py.
"""

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.readiness.kernels import launches, mamba_layers
from vllm.v1.readiness.kernels.launches import Launcher

LAYERS, BLOCKS, SIZE = 4, 6, 8
#: Chunks of prompts, and numbers in a state.
CHUNKS, WIDTH = 2, 4
#: Kernel to its parameters; it writes to the last one, and to states.
PARAMETERS = {
    "_causal_conv1d_fwd_kernel": (
        *("x_ptr", "w_ptr", "bias_ptr", "initial_states_ptr", "cache_indices_ptr"),
        *("query_start_loc_ptr", "o_ptr"),
    ),
    "_chunk_cumsum_fwd_kernel": ("dt_ptr", "A_ptr", "dt_bias_ptr", "dA_cumsum_ptr"),
    "_chunk_state_fwd_kernel": ("x_ptr", "b_ptr", "dA_cumsum_ptr", "states_ptr"),
    "_state_passing_fwd_kernel": ("states_ptr", "dA_cs_ptr", "out_ptr"),
    "_bmm_chunk_fwd_kernel": ("a_ptr", "b_ptr", "out_ptr"),
    "_chunk_scan_fwd_kernel": ("cb_ptr", "x_ptr", "states_ptr", "D_ptr", "out_ptr"),
    "_causal_conv1d_update_kernel": (
        *("w_ptr", "bias_ptr", "conv_state_ptr", "conv_state_indices_ptr", "x_ptr", "o_ptr"),
    ),
    "_selective_scan_update_kernel": (
        *("x_ptr", "dt_ptr", "dt_bias_ptr", "A_ptr", "B_ptr", "C_ptr", "D_ptr"),
        *("state_batch_indices_ptr", "dst_state_batch_indices_ptr", "rand_seed_ptr"),
        *("state_ptr", "out_ptr"),
    ),
}
STATES = ("initial_states_ptr", "conv_state_ptr", "state_ptr")


class Kernel:
    """Stands for a compiled kernel of Triton. Its tensors have ``SIZE`` numbers, whole ones."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.pre_run_hooks: list[Callable[..., None]] = []
        self.launcher = Launcher(self, self)
        self.launcher._driver = SimpleNamespace(
            active=SimpleNamespace(
                get_current_device=lambda: 0, get_current_stream=lambda device: 7
            )
        )
        self.launcher._knobs = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)

    def __getitem__(self, grid: Callable[..., Any]) -> Callable[..., Any]:
        def launch(**named: Any) -> Any:
            self.run(
                *grid(named), 1, 1, 7, "function", "metadata", None, None, None, *named.values()
            )
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return launch

    def run(self, *values: Any) -> None:
        """Write sums of what is read, each by its place, to the last parameter and to states."""
        assert values[3:6] == (7, "function", "metadata")
        *given, scale = values[9:]
        names = PARAMETERS[self.__name__]
        memory = {
            name: _memory(value)
            for name, value in zip(names, given, strict=True)
            if value is not None
        }
        total = sum(
            (place + 2) * int(memory[name].sum())
            for place, name in enumerate(names[:-1])
            if name in memory
        )
        for name in (names[-1], *STATES):
            if name in memory:
                memory[name][:] = (total % 1009 + scale) * (torch.arange(SIZE) + 1) % 97


def _memory(value: Any) -> torch.Tensor:
    """Return the numbers at a tensor or an address."""
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return torch.frombuffer((ctypes.c_char * (4 * SIZE)).from_address(address), dtype=torch.int32)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=torch.int32)


class Layer:
    """Stands for a MambaMixer2."""

    def __init__(self, place: int) -> None:
        self.prefix = f"layers.{place}"
        self.kernels = KERNELS
        self.kv_cache = (numbers(BLOCKS, SIZE), numbers(BLOCKS, 1, 1, WIDTH))
        self.conv_weights, self.conv1d = numbers(SIZE), SimpleNamespace(bias=numbers(SIZE))
        self.A, self.D, self.dt_bias = numbers(SIZE), numbers(SIZE), numbers(SIZE)
        self.activation, self.num_spec = "silu", 0
        #: What the kernels get for D.
        self.given_D = self.D
        #: Of stochastic rounding.
        self.seed: torch.Tensor | None = None
        self.metadata: Any = None
        #: Number of times that "upstream" computed the layer.
        self.computed = 0

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Launch what upstream's layer launches."""
        self.computed += 1
        metadata, bias = self.metadata, self.conv1d.bias
        conv, ssm = self.kv_cache
        x, other = projected_states[0], projected_states[1]
        if metadata.num_prefills:
            blocks, starts = metadata.state_indices_tensor_p, metadata.query_start_loc_p
            begun, sums, products = (torch.empty(SIZE, dtype=torch.int32) for _ in range(3))
            states, passed = (torch.empty(CHUNKS, 1, 1, WIDTH, dtype=torch.int32) for _ in range(2))
            self.launch(
                "_causal_conv1d_fwd", x, self.conv_weights, bias, conv, blocks, starts, begun
            )
            self.launch("_chunk_cumsum_fwd", other, self.A, self.dt_bias, sums)
            self.launch("_chunk_state_fwd", begun, begun, sums, states)
            self.launch(
                "_state_passing_fwd", states.view(CHUNKS, -1), sums, passed.view(CHUNKS, -1)
            )
            self.launch("_bmm_chunk_fwd", begun, begun, products)
            self.launch("_chunk_scan_fwd", products, begun, passed, self.given_D, output[0])
            ssm[blocks] = passed[metadata.last_chunk_indices_p]
        if metadata.num_decodes:
            blocks = metadata.state_indices_tensor_d
            self.launch("_causal_conv1d_update", self.conv_weights, bias, conv, blocks, x, x)
            self.launch(
                "_selective_scan_update",
                *(x, other, self.dt_bias, self.A, x, other, self.given_D),
                *(blocks, blocks, self.seed, ssm, output[1]),
            )

    def launch(self, kernel: str, *tensors: torch.Tensor | None) -> None:
        """Launch a kernel with these tensors."""
        name = f"{kernel}_kernel"
        named = dict(zip(PARAMETERS[name], tensors, strict=True))
        self.kernels[name].launcher[lambda given: (1,)](**named, scale=3)


class Derived(Layer):
    """A layer that a plugin changes."""

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        super().conv_ssm_forward(projected_states, output)
        output += 1


KERNELS = {name: Kernel(name) for name in PARAMETERS}


def metadata(prompts: int, decodes: int) -> dict[str, Any]:
    """Return a step's metadata that all layers share."""
    indices = torch.arange(prompts, dtype=torch.int32)
    return {
        "num_prefills": prompts,
        "num_decodes": decodes,
        "query_start_loc_p": numbers(SIZE),
        "last_chunk_indices_p": indices.flip(0),
        "seq_idx_p": indices,
        "prep_initial_states": False,
        "block_idx_last_scheduled_token": None,
    }


def step(
    layers: list[Layer],
    run: Any,
    prompts: int = 2,
    decodes: int = 2,
    fields: Callable[[], dict[str, Any]] = dict,
) -> list[torch.Tensor]:
    """Compute a step; every other layer has blocks, and these fields, of its own.

    Return what layers wrote.
    """
    shared, context = metadata(prompts, decodes), SimpleNamespace(attn_metadata={})
    both = []
    for _ in range(2):
        blocks = torch.randperm(BLOCKS).to(torch.int32)[: prompts + decodes].repeat(SIZE)
        own = {
            "state_indices_tensor_p": blocks[decodes : decodes + prompts],
            "state_indices_tensor_d": blocks[:decodes],
        }
        both.append(SimpleNamespace(**{**shared, **own, **fields()}))
    for place, layer in enumerate(layers):
        layer.metadata = context.attn_metadata[layer.prefix] = both[place % 2]
    results = []
    for layer in layers:
        projected, output = numbers(3, SIZE), numbers(3, SIZE)
        run(context, layer, projected, output)
        results += [projected, output]
    return results


def forward(
    run: Any, change: Callable[[list[Layer]], None] = lambda layers: None, **of_steps: Any
) -> tuple[list[torch.Tensor], list[int]]:
    """Compute three steps; return all that layers wrote, and how often each was upstream's."""
    torch.manual_seed(0)
    layers = [Layer(place) for place in range(LAYERS)]
    change(layers)
    results = [tensor for _ in range(3) for tensor in step(layers, run, **of_steps)]
    results += [states for layer in layers for states in layer.kv_cache]
    return results, [layer.computed for layer in layers]


def upstreams(context: Any, layer: Layer, projected: torch.Tensor, output: torch.Tensor) -> None:
    layer.conv_ssm_forward(projected_states=projected, output=output)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream, layers of upstream's, and launchers that have seen which arguments are tensors."""
    monkeypatch.setattr(mamba_layers, "_stream", lambda tensor: 7)
    monkeypatch.setattr(MambaMixer2, "conv_ssm_forward", Layer.conv_ssm_forward)
    forward(upstreams)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 0), (0, 3)], ids=["both", "prompts", "decodes"])
def test_layers_repeat_the_first_ones_launches(sizes: tuple[int, int]) -> None:
    prompts, decodes = sizes
    theirs, _ = forward(upstreams, prompts=prompts, decodes=decodes)
    ours, computed = forward(mamba_layers.run, prompts=prompts, decodes=decodes)
    assert equal(ours, theirs)
    assert computed == [3, 0, 0, 0]


def _each(**values: Any) -> Callable[[list[Layer]], None]:
    def change(layers: list[Layer]) -> None:
        for layer in layers:
            for name, value in values.items():
                setattr(layer, name, value)

    return change


def _third(change: Callable[[Layer], None]) -> Callable[[list[Layer]], None]:
    return lambda layers: change(layers[2])


def _no_bias(layer: Layer) -> None:
    layer.conv1d = SimpleNamespace(bias=None)


def _copied(layers: list[Layer]) -> None:
    for layer in layers:
        layer.given_D = layer.D.clone()


def _other(name: str, tensor: Callable[[], torch.Tensor]) -> Callable[[list[Layer]], None]:
    return _third(lambda layer: setattr(layer, name, tensor()))


def _seeded(layers: list[Layer]) -> None:
    for layer in layers:
        layer.seed = numbers(SIZE)


def _wrapped(layer: Layer) -> None:
    forward = layer.conv_ssm_forward

    def with_more(projected_states: torch.Tensor, output: torch.Tensor) -> None:
        forward(projected_states, output)
        output += 1

    vars(layer)["conv_ssm_forward"] = with_more


def _all_wrapped(layers: list[Layer]) -> None:
    """Give all layers the same forward, which takes them in turns."""
    turns = itertools.cycle(layers)

    def with_more(projected_states: torch.Tensor, output: torch.Tensor) -> None:
        Layer.conv_ssm_forward(next(turns), projected_states, output)
        output += 1

    for layer in layers:
        vars(layer)["conv_ssm_forward"] = with_more


@pytest.mark.parametrize(
    ("change", "computed"),
    [
        (_each(num_spec=2), [3, 3, 3, 3]),
        (_each(__class__=Derived), [3, 3, 3, 3]),
        (_third(lambda layer: setattr(layer, "__class__", Derived)), [3, 0, 3, 0]),
        (_copied, [3, 3, 3, 3]),
        (_third(_no_bias), [3, 0, 3, 0]),
        (_third(_wrapped), [3, 0, 3, 0]),
        (_all_wrapped, [3, 3, 3, 3]),
        (_seeded, [3, 3, 3, 3]),
        (_other("A", lambda: numbers(SIZE + 1)[1:]), [3, 0, 3, 0]),
        (_other("A", lambda: numbers(SIZE).view(torch.float32)), [3, 0, 3, 0]),
        (_other("A", lambda: numbers(2 * SIZE)), [3, 0, 3, 0]),
        (_other("A", lambda: numbers(2 * SIZE)[::2]), [3, 0, 3, 0]),
        (_third(lambda layer: setattr(layer, "activation", "swish")), [3, 0, 3, 0]),
    ],
    ids=[
        *("drafts", "derived", "one derived", "a copy of a weight", "no bias"),
        *("one wrapped", "all by one", "seeds"),
        *("alignment", "dtype", "shape", "stride", "activation"),
    ],
)
def test_a_layer_unlike_the_first_is_upstreams(
    change: Callable[[list[Layer]], None], computed: list[int]
) -> None:
    theirs, _ = forward(upstreams, change)
    ours, counts = forward(mamba_layers.run, change)
    assert equal(ours, theirs)
    assert counts == computed


@pytest.mark.parametrize(
    ("fields", "computed"),
    [
        (lambda: {"prep_initial_states": True}, [3, 3, 3, 3]),
        (lambda: {"block_idx_last_scheduled_token": numbers(SIZE)}, [3, 3, 3, 3]),
        (lambda: {"query_start_loc_p": numbers(SIZE)}, [3, 3, 0, 3]),
    ],
    ids=["continued prompts", "all blocks", "more that differs between layers"],
)
def test_a_step_whose_layers_share_less_is_upstreams(
    fields: Callable[[], dict[str, Any]], computed: list[int]
) -> None:
    theirs, _ = forward(upstreams, fields=fields)
    ours, counts = forward(mamba_layers.run, fields=fields)
    assert equal(ours, theirs)
    assert counts == computed


@pytest.mark.parametrize(
    "case", ["off", "no stream", "another kernel", "watched", "large", "larger"]
)
def test_a_step_is_upstreams_with(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "off":
        monkeypatch.setenv("VLLM_READINESS", "-mamba-launches")
    elif case == "no stream":
        monkeypatch.setattr(mamba_layers, "_stream", lambda tensor: None)
    elif case == "another kernel":  # such as FlashInfer's, which is not Triton's
        other = KERNELS["_selective_scan_update_kernel"]
        monkeypatch.setattr(other, "launcher", other)
    elif case == "watched":
        hooks = KERNELS["_bmm_chunk_fwd_kernel"].pre_run_hooks
        monkeypatch.setattr(KERNELS["_bmm_chunk_fwd_kernel"], "pre_run_hooks", [*hooks, print])
        monkeypatch.setattr("builtins.print", lambda *values: None)
    elif case == "larger":
        monkeypatch.setattr(mamba_layers, "_MOST", 1)
        monkeypatch.setattr(launches, "noting", None)  # it keeps what upstream frees
    else:
        monkeypatch.setattr(mamba_layers, "_MOST", 100)
    theirs, _ = forward(upstreams)
    ours, computed = forward(mamba_layers.run)
    assert equal(ours, theirs)
    assert computed == [3] * LAYERS
