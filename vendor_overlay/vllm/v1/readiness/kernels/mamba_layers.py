"""Feature ``mamba-launches``: repeat the launches of a step's first Mamba 2 layer for the others.

For each Mamba 2 layer upstream takes views of tensors, allocates buffers, checks shapes, and
collects the arguments of up to eight kernels: some 40 calls of torch, which give each layer of a
step the same but for addresses. Here upstream computes the first layer, and its launches are noted.
Each other layer of the step repeats them with the addresses of its own tensors, and with the first
layer's buffers, since layers run one behind the other. A step is not repeated if any launch is
unknown, if a kernel got anything but what it is known to read (such as a copy of a weight), or if
its buffers are large: a step of many tokens, for which the device takes longer.
"""

# mirrors: vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.conv_ssm_forward
# mirrors: vllm.model_executor.layers.mamba.ops.ssd_combined:_mamba_chunk_scan_combined_fwd

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.kernels import launches
from vllm.v1.readiness.kernels.launches import Launch, Note

#: Most bytes of buffers that are kept while a step's other layers run.
_MOST = 64 << 20
#: Attribute of a ForwardContext: its :class:`Step`, or None if its layers are upstream's.
_STEP = "_readiness_step"


def run(context: Any, layer: Any, projected: torch.Tensor, output: torch.Tensor) -> None:
    """Compute the states and the output of a Mamba 2 layer.

    Args:
        context: the ForwardContext.
        layer: a MambaMixer2.
        projected: ``[tokens, channels]``, what the layer's first projection gave.
        output: ``[tokens, channels]``, which the result is written to.
    """
    known = vars(context)
    if _STEP not in known:
        known[_STEP] = _begin(context, layer, projected, output)
        return
    step: Step | None = known[_STEP]
    if step is not None:
        metadata = context.attn_metadata[layer.prefix]
        inputs = Inputs.of(layer, metadata, projected, output)
        if step.serves(layer, metadata, inputs):
            step.repeat(metadata, inputs)
            return
    layer.conv_ssm_forward(projected_states=projected, output=output)


class Inputs(NamedTuple):
    """The tensors that a layer's kernels read or write, apart from buffers and the step's metadata.

    Attributes:
        projected: ``[tokens, channels]``.
        output: ``[tokens, channels]``.
        conv_weights: ``[channels, width]``.
        conv_bias: ``[channels]``, or None.
        A: ``[heads]``.
        D: ``[heads]``.
        dt_bias: ``[heads]``.
        conv_states: the states of the convolution, for each block.
        ssm_states: ``[blocks, heads, dim, states]``.
        prompts: ``[prompts]``, the block of each prompt; None without prompts.
        decodes: ``[decodes, 1]``, the block of each decode; None without decodes.
    """

    projected: torch.Tensor
    output: torch.Tensor
    conv_weights: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    conv_states: torch.Tensor
    ssm_states: torch.Tensor
    prompts: torch.Tensor | None
    decodes: torch.Tensor | None

    @classmethod
    def of(
        cls, layer: Any, metadata: Any, projected: torch.Tensor, output: torch.Tensor
    ) -> "Inputs":
        """Return those of a layer."""
        conv_states, ssm_states = layer.kv_cache
        return cls(
            projected,
            output,
            layer.conv_weights,
            layer.conv1d.bias,
            layer.A,
            layer.D,
            layer.dt_bias,
            conv_states,
            ssm_states,
            metadata.state_indices_tensor_p if metadata.num_prefills else None,
            metadata.state_indices_tensor_d if metadata.num_decodes else None,
        )

    def addresses(self) -> list[int]:
        """Return the address of each tensor; 0 for None."""
        return [0 if tensor is None else tensor.data_ptr() for tensor in self]

    def kinds(self) -> list[Any]:
        """Return what else a launch depends on, for each tensor."""
        return [
            None
            if tensor is None
            else (
                tensor.device,
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.data_ptr() % 16,
            )
            for tensor in self
        ]


#: Kernel to its parameters that are tensors, in the order of the launches, to the name of an input;
#: to None for a buffer or the step's metadata. With any other tensor a step is not repeated.
#: A step without prompts has the last two, one without decodes the others.
_KERNELS: Mapping[str, Mapping[str, str | None]] = {
    "_causal_conv1d_fwd_kernel": {
        "x_ptr": "projected",
        "w_ptr": "conv_weights",
        "bias_ptr": "conv_bias",
        "initial_states_ptr": "conv_states",
        "cache_indices_ptr": "prompts",
        "has_initial_states_ptr": None,
        "query_start_loc_ptr": None,
        "batch_ptr": None,
        "token_chunk_offset_ptr": None,
        "o_ptr": None,
    },
    "_chunk_cumsum_fwd_kernel": {
        "dt_ptr": "projected",
        "A_ptr": "A",
        "dt_bias_ptr": "dt_bias",
        **dict.fromkeys(("dt_out_ptr", "dA_cumsum_ptr", "cu_chunk_seqlens_ptr")),
    },
    "_chunk_state_fwd_kernel": dict.fromkeys(
        ("x_ptr", "b_ptr", "states_ptr", "dt_ptr", "dA_cumsum_ptr", "cu_chunk_seqlens_ptr")
    ),
    "_state_passing_fwd_kernel": dict.fromkeys(
        ("states_ptr", "out_ptr", "dA_cs_ptr", "last_chunk_indices_ptr")
    ),
    "_bmm_chunk_fwd_kernel": dict.fromkeys(("a_ptr", "b_ptr", "out_ptr", "cu_chunk_seqlens_ptr")),
    "_chunk_scan_fwd_kernel": {
        "out_ptr": "output",
        "D_ptr": "D",
        **dict.fromkeys(("cb_ptr", "x_ptr", "dt_ptr", "dA_cumsum_ptr", "seq_idx_ptr", "C_ptr")),
        **dict.fromkeys(("states_ptr", "cu_chunk_seqlens_ptr")),
    },
    "_causal_conv1d_update_kernel": {
        "x_ptr": "projected",
        "w_ptr": "conv_weights",
        "bias_ptr": "conv_bias",
        "conv_state_ptr": "conv_states",
        "conv_state_indices_ptr": "decodes",
        "o_ptr": "projected",
    },
    "_selective_scan_update_kernel": {
        "state_ptr": "ssm_states",
        "x_ptr": "projected",
        "dt_ptr": "projected",
        "dt_bias_ptr": "dt_bias",
        "A_ptr": "A",
        "B_ptr": "projected",
        "C_ptr": "projected",
        "D_ptr": "D",
        "out_ptr": "output",
        "state_batch_indices_ptr": "decodes",
        "dst_state_batch_indices_ptr": "decodes",
    },
}
_DECODES = ("_causal_conv1d_update_kernel", "_selective_scan_update_kernel")
_PROMPTS = tuple(name for name in _KERNELS if name not in _DECODES)


class Repeated(NamedTuple):
    """A launch that a step repeats.

    Attributes:
        launch: the first layer's.
        values: for each parameter, addresses for tensors.
        places: index in ``values``, index in :class:`Inputs` and offset in bytes of each input.
    """

    launch: Launch
    values: list[Any]
    places: list[tuple[int, int, int]]


class Step:
    """The launches of a step's first layer.

    Args:
        layer: the first one.
        metadata: its metadata.
        inputs: its tensors.
        notes: its launches.
        stream: handle of CUDA's stream, on which all layers of a step run.

    Raises:
        ValueError: the launches are not to be repeated.
    """

    def __init__(
        self, layer: Any, metadata: Any, inputs: Inputs, notes: list[Note | None], stream: int
    ) -> None:
        prompts = _PROMPTS if inputs.prompts is not None else ()
        decodes = _DECODES if inputs.decodes is not None else ()
        if [note and note.launch.name for note in notes] != [*prompts, *decodes]:
            raise ValueError("other kernels")
        self._stream = stream
        self._kind = _kind(layer)
        self._kinds = inputs.kinds()
        self._metadata = metadata
        #: Address to the last view of it, for as long as launches use it.
        self._buffers: dict[int, torch.Tensor] = {}
        repeated = [self._repeated(note, inputs) for note in notes if note is not None]
        self._prompts, self._decodes = repeated[: len(prompts)], repeated[len(prompts) :]
        if sum(tensor.nbytes for tensor in self._buffers.values()) > _MOST:
            raise ValueError("large buffers")
        #: ``[chunks, heads, dim, states]`` behind each chunk of the prompts, and
        #: ``[prompts, heads, dim, states]`` behind each prompt.
        self._states = self._ends = torch.empty(0)
        if self._prompts:
            scan = self._prompts[-1]
            place = scan.launch.parameters.index("states_ptr")
            self._states = self._buffers[scan.values[place]]
            self._ends = self._states.new_empty((metadata.num_prefills, *self._states.shape[1:]))
        #: Id of metadata of layers that are served to ``[prompts]``, the block of each.
        self._blocks = {id(metadata): _blocks(inputs)}

    def serves(self, layer: Any, metadata: Any, inputs: Inputs) -> bool:
        """Return whether a layer's launches are those of the first one but for addresses."""
        if _kind(layer) != self._kind or inputs.kinds() != self._kinds:
            return False
        if id(metadata) not in self._blocks:
            if not self._shares(metadata):
                return False
            self._blocks[id(metadata)] = _blocks(inputs)
        return True

    def repeat(self, metadata: Any, inputs: Inputs) -> None:
        """Compute a layer that this step serves."""
        addresses = inputs.addresses()
        for one in self._prompts:
            _launch(one, addresses, self._stream)
        if self._prompts:
            torch.index_select(self._states, 0, metadata.last_chunk_indices_p, out=self._ends)
            inputs.ssm_states.index_copy_(0, self._blocks[id(metadata)], self._ends)
        for one in self._decodes:
            _launch(one, addresses, self._stream)

    def _shares(self, metadata: Any) -> bool:
        """Return whether a layer's metadata is the first one's but for the blocks of requests."""
        ours = vars(self._metadata)
        return all(
            value is ours[name]
            for name, value in vars(metadata).items()
            if name not in ("state_indices_tensor_p", "state_indices_tensor_d")
        )

    def _repeated(self, note: Note, inputs: Inputs) -> Repeated:
        """Find the inputs among a launch's tensors, and keep the others."""
        launch, tensors = note
        known = _KERNELS[launch.name]
        values, places = launch.values.copy(), []
        for place, tensor in zip(launch.places, tensors, strict=True):
            address = values[place] = tensor.data_ptr()
            parameter = launch.parameters[place]
            if parameter not in known:
                raise ValueError("a tensor of unknown use, such as a seed")
            field = known[parameter]
            if field is not None:
                index = Inputs._fields.index(field)
                places.append((place, index, _offset(inputs[index], address)))
            else:
                self._buffers[address] = tensor
        return Repeated(launch, values, places)


def _launch(one: Repeated, addresses: list[int], stream: int) -> None:
    """Repeat a launch with the inputs at these addresses."""
    values = one.values
    for place, index, offset in one.places:
        values[place] = addresses[index] + offset
    one.launch.repeat(stream, values)


def _blocks(inputs: Inputs) -> torch.Tensor | None:
    """Return the blocks of prompts as torch takes them for an index."""
    return None if inputs.prompts is None else inputs.prompts.long()


def _offset(tensor: torch.Tensor | None, address: int) -> int:
    """Return how far behind a contiguous tensor's begin an address in it is, in bytes."""
    offset: int = 0 if tensor is None else address - tensor.data_ptr()
    if tensor is None or (offset and not (0 < offset < tensor.nbytes and tensor.is_contiguous())):
        raise ValueError("a kernel has another tensor than the layer, such as a copy")
    return offset


def _begin(context: Any, layer: Any, projected: torch.Tensor, output: torch.Tensor) -> Step | None:
    """Let upstream compute a step's first layer; return the step if the others may repeat it."""
    stream = _stream(projected)
    metadata = None if stream is None else _metadata(context, layer)
    forward = partial(layer.conv_ssm_forward, projected_states=projected, output=output)
    if stream is None or metadata is None:
        forward()
        return None
    with launches.noting() as notes:
        forward()
    inputs = Inputs.of(layer, metadata, projected, output)
    try:
        return Step(layer, metadata, inputs, notes, stream)
    except ValueError:
        return None


def _metadata(context: Any, layer: Any) -> Any:
    """Return the metadata of a layer whose launches may be noted; else None."""
    given = context.attn_metadata
    if (
        registry.MAMBA_LAUNCHES not in switch.enabled()
        or not isinstance(given, dict)
        or not _is_upstreams(layer)
    ):
        return None
    metadata = given[layer.prefix]
    # Noting keeps buffers that upstream frees earlier.
    chunks = len(metadata.seq_idx_p) if metadata.num_prefills else 0
    states = chunks * layer.kv_cache[1][0].numel() * torch.float32.itemsize
    # States that prompts continue from are a copy for each layer. Drafts, and the states of all
    # blocks, have more tensors that differ between layers.
    refused = (
        states > _MOST
        or metadata.prep_initial_states
        or layer.num_spec
        or metadata.block_idx_last_scheduled_token is not None
    )
    return None if refused else metadata


def _kind(layer: Any) -> tuple[Any, ...]:
    """Return what a layer's launches depend on but its tensors."""
    return type(layer), vars(layer).get("conv_ssm_forward"), layer.activation


def _is_upstreams(layer: Any) -> bool:
    """Return whether a layer's forward is upstream's, and not a plugin's."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    forward = type(layer).conv_ssm_forward
    return forward is MambaMixer2.conv_ssm_forward and "conv_ssm_forward" not in vars(layer)


def _stream(tensor: torch.Tensor) -> int | None:
    """Return the handle of CUDA's stream; None without CUDA or while a graph is captured."""
    if not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream
