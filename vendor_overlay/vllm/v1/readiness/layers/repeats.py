"""Feature ``mamba-launches``: repeat the launches of a step's first recurrent layer for the others.

For each recurrent layer of a step with a prompt upstream takes views of tensors, allocates buffers,
checks shapes, and launches up to ten kernels through Triton, so that the host takes longer than the
device. But the arguments are those of the step's first layer, apart from addresses. Here upstream
computes the first layer, and its launches are noted. Each other layer of the step repeats them with
the addresses of its own tensors and of its own metadata, and with the first layer's buffers, since
layers run one behind the other.

A layer is repeated only if all that its launches depend on is as in the first one: kinds, strides
and alignment of its tensors, numbers in its metadata, and its class. A step is not repeated if any
launch is unknown, if a kernel got anything but what it is known to read (such as a copy of a
weight, or of a buffer), or if its buffers are large: a step of many tokens, for which the device
takes longer.
(https://github.com/vllm-project/vllm/pull/34838)
"""

# mirrors: nothing

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.layers import launches
from vllm.v1.readiness.layers.launches import Launch, Note

#: Attribute of a ForwardContext: kind of layers to its :class:`Step`, or to None if the step's
#: layers are upstream's.
_STEPS = "_readiness_steps"
#: Most memory of buffers that are kept while a step's other layers run: a part of the device's.
_PART = 100

#: Name to tensor. An absent tensor is not in it.
Tensors = Mapping[str, torch.Tensor]


def run(kind: "type[Step]", context: Any, layer: Any, *given: torch.Tensor) -> None:
    """Compute the states and the output of a layer.

    Args:
        kind: of the layer.
        context: the ForwardContext.
        layer: upstream's module.
        given: arguments of the layer's forward, the output last.
    """
    steps = vars(context).setdefault(_STEPS, {})
    if kind not in steps:
        steps[kind] = _begin(kind, context, layer, given)
        return
    step: Step | None = steps[kind]
    if step is None or not step.repeat(layer, context.attn_metadata[layer.prefix], given):
        kind.forward(layer, *given)


def _begin(
    kind: "type[Step]", context: Any, layer: Any, given: Sequence[torch.Tensor]
) -> "Step | None":
    """Let upstream compute a step's first layer; return the step if the others may repeat it."""
    stream = _stream(given[0])
    by_layer = context.attn_metadata
    if (
        stream is None
        or registry.MAMBA_LAUNCHES not in switch.enabled()
        or not isinstance(by_layer, dict)
        or not kind.is_upstreams(layer)
        or not kind.may_repeat(layer, by_layer[layer.prefix])
    ):
        kind.forward(layer, *given)
        return None
    with launches.noting() as notes:
        kind.forward(layer, *given)
    try:
        return kind(layer, by_layer[layer.prefix], given, notes, stream)
    except (ValueError, torch.OutOfMemoryError):
        return None


class _Shared(NamedTuple):
    """Parts of a step that are the same for layers with the same metadata.

    Attributes:
        addresses: of the metadata's tensors, by name.
        blocks: int64 [prompts], the block of each prompt; None without prompts.
        fresh: bool [prompts, 1, 1, 1], whether a prompt begins with an empty state; None if no
            prompt continues from a state.
    """

    addresses: Mapping[str, int]
    blocks: torch.Tensor | None
    fresh: torch.Tensor | None


class _Repeated(NamedTuple):
    """A launch that a step repeats.

    Attributes:
        launch: the first layer's.
        values: for each parameter, addresses for tensors.
        places: index in ``values``, name and offset in bytes of each tensor that is not a buffer.
    """

    launch: Launch
    values: list[Any]
    places: list[tuple[int, str, int]]


class Step(ABC):
    """The launches of a step's first layer of a kind.

    Attributes:
        KERNELS: kernel to its parameters that are tensors, to the name of the tensor; to None for
            a buffer. With any other tensor a step is not repeated.
        METHODS: names of the methods of upstream's class that compute a layer.
        initial: ``[prompts, heads, dim, states]``, the states that prompts begin with; None if all
            begin with none.

    Args:
        layer: the first one.
        metadata: its metadata.
        given: arguments of its forward.
        notes: its launches.
        stream: handle of CUDA's stream, on which all layers of a step run.

    Raises:
        ValueError: the launches are not to be repeated.
    """

    KERNELS: ClassVar[Mapping[str, Mapping[str, str | None]]]
    METHODS: ClassVar[Sequence[str]]

    def __init__(
        self,
        layer: Any,
        metadata: Any,
        given: Sequence[torch.Tensor],
        notes: Sequence[Note | None],
        stream: int,
    ) -> None:
        noted = {note.launch.name: note for note in notes if note is not None}
        if len(noted) < len(notes) or [*noted] not in self.orders(metadata):
            raise ValueError("other kernels")
        own, shared = self.own(layer, *given), self.shared(metadata)
        self._stream = stream
        self._layer = type(layer), self.settings(layer)
        addresses = _addresses(shared)
        self._own, self._shared = _kinds(own, _addresses(own)), _kinds(shared, addresses)
        self._numbers = _numbers(metadata)
        inputs = {**shared, **own}
        #: By kernel and parameter.
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        #: By kernel, in order.
        self.repeated = {name: self._place(note, inputs) for name, note in noted.items()}
        self._check_buffers()
        self.initial: torch.Tensor | None = None
        self.prepare(metadata, own)
        #: By id of the metadata; None for metadata that is unlike the first one.
        self._known: dict[int, _Shared | None] = {id(metadata): self._share(shared, addresses)}

    # Defined by each kind of layers.

    @staticmethod
    @abstractmethod
    def forward(layer: Any, *given: torch.Tensor) -> None:
        """Compute a layer by upstream's code."""

    @staticmethod
    @abstractmethod
    def upstreams() -> type:
        """Return upstream's class of the layers."""

    @classmethod
    @abstractmethod
    def may_repeat(cls, layer: Any, metadata: Any) -> bool:
        """Return whether the launches of a step may be noted, by what is known before it."""

    @staticmethod
    @abstractmethod
    def settings(layer: Any) -> tuple[Any, ...]:
        """Return what a layer's launches depend on but its class and its tensors."""

    @staticmethod
    @abstractmethod
    def own(layer: Any, *given: torch.Tensor) -> Tensors:
        """Return the tensors that belong to a layer."""

    @staticmethod
    @abstractmethod
    def shared(metadata: Any) -> Tensors:
        """Return the tensors that layers with the same metadata share."""

    @staticmethod
    @abstractmethod
    def orders(metadata: Any) -> Sequence[Sequence[str]]:
        """Return the kernels that a layer may launch, in order, for each way to compute it."""

    def ends(self) -> Collection[tuple[str, str]]:
        """Return kernels and parameters of buffers that only one kernel gets."""
        return ()

    @abstractmethod
    def prepare(self, metadata: Any, own: Tensors) -> None:
        """Prepare the buffers of a step with prompts; raise ValueError if one is missing."""

    @abstractmethod
    def compute(self, layer: Any, own: Tensors, shared: _Shared, addresses: dict[str, int]) -> None:
        """Compute a layer as the first one was."""

    # The same for all kinds.

    @classmethod
    def is_upstreams(cls, layer: Any) -> bool:
        """Return whether a layer's forward is upstream's, and not a plugin's."""
        own, upstreams = type(layer), cls.upstreams()
        return not cls._is_changed(layer) and all(
            getattr(own, name, None) is getattr(upstreams, name) for name in cls.METHODS
        )

    @classmethod
    def _is_changed(cls, layer: Any) -> bool:
        """Return whether a layer has a forward that is not its class's."""
        return any(name in vars(layer) for name in cls.METHODS)

    def repeat(self, layer: Any, metadata: Any, given: Sequence[torch.Tensor]) -> bool:
        """Compute a layer if its launches are those of the first one; return whether they are."""
        key = id(metadata)
        if key not in self._known:
            self._known[key] = self._compare(metadata)
        shared = self._known[key]
        settings = type(layer), self.settings(layer)
        if shared is None or settings != self._layer or self._is_changed(layer):
            return False
        own = self.own(layer, *given)
        addresses = _addresses(own)
        if _kinds(own, addresses) != self._own:
            return False
        self.compute(layer, own, shared, {**shared.addresses, **addresses})
        return True

    def launch(self, names: Iterable[str], addresses: Mapping[str, int]) -> None:
        """Repeat the launches of these kernels."""
        for kernel in names:
            launch, values, places = self.repeated[kernel]
            for index, name, offset in places:
                values[index] = addresses[name] + offset
            launch.repeat(self._stream, values)

    def buffer(self, kernel: str, parameter: str) -> torch.Tensor:
        """Return a buffer of the first layer.

        Raises:
            ValueError: the kernel was not launched, or got none.
        """
        if (kernel, parameter) not in self._buffers:
            raise ValueError(f"no {parameter} of {kernel}")
        return self._buffers[kernel, parameter]

    def load(self, states: torch.Tensor, shared: _Shared) -> None:
        """Gather the states that prompts begin with, if any has one."""
        if self.initial is not None:
            assert shared.blocks is not None
            torch.index_select(states, 0, shared.blocks, out=self.initial)
            if shared.fresh is not None:
                self.initial.masked_fill_(shared.fresh, 0)

    def _compare(self, metadata: Any) -> _Shared | None:
        """Return what layers with this metadata share; None if it is unlike the first layer's."""
        tensors = self.shared(metadata)
        addresses = _addresses(tensors)
        if _numbers(metadata) != self._numbers or _kinds(tensors, addresses) != self._shared:
            return None
        return self._share(tensors, addresses)

    def _share(self, tensors: Tensors, addresses: Mapping[str, int]) -> _Shared:
        """Return what layers with the metadata of these tensors share."""
        blocks, begun = tensors.get("prompts"), tensors.get("begun")
        return _Shared(
            addresses,
            None if blocks is None else blocks.long(),
            None if begun is None or self.initial is None else ~begun[:, None, None, None],
        )

    def _place(self, note: Note, inputs: Tensors) -> _Repeated:
        """Find the inputs among a launch's tensors, and keep the buffers."""
        launch, arguments = note
        known = self.KERNELS[launch.name]
        values, places = [*arguments.values()], []
        for index, (parameter, tensor) in enumerate(arguments.items()):
            if not isinstance(tensor, torch.Tensor):
                continue
            if parameter not in known:
                raise ValueError("a tensor of unknown use, such as a seed")
            address = values[index] = tensor.data_ptr()
            if (name := known[parameter]) is not None:
                places.append((index, name, _offset(inputs.get(name), address)))
            else:
                self._buffers[launch.name, parameter] = tensor
        return _Repeated(launch, values, places)

    def _check_buffers(self) -> None:
        """Raise ValueError if a buffer was copied between two kernels, or if buffers are large."""
        users: dict[int, set[str]] = {}
        storages = {key: tensor.untyped_storage() for key, tensor in self._buffers.items()}
        for (kernel, _), storage in storages.items():
            users.setdefault(storage.data_ptr(), set()).add(kernel)
        for key, storage in storages.items():
            if key not in self.ends() and len(users[storage.data_ptr()]) < 2:
                raise ValueError("a buffer of one kernel, such as a copy")
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
        if sum(sizes.values()) > most(next(iter(self._own.values()))[0]):
            raise ValueError("large buffers")


def convolutions(rows: str) -> dict[str, Mapping[str, str | None]]:
    """Return the tensors of convolutions of prompts and of decodes, for :attr:`Step.KERNELS`.

    Args:
        rows: name of the tensor that is convolved.
    """
    return {
        "_causal_conv1d_fwd_kernel": {
            "x_ptr": rows,
            "w_ptr": "conv_weights",
            "bias_ptr": "conv_bias",
            "initial_states_ptr": "conv_states",
            "cache_indices_ptr": "prompts",
            "has_initial_states_ptr": "begun",
            "query_start_loc_ptr": "starts",
            "batch_ptr": "conv_rows",
            "token_chunk_offset_ptr": "conv_offsets",
            "o_ptr": None,
        },
        "_causal_conv1d_update_kernel": {
            "x_ptr": rows,
            "w_ptr": "conv_weights",
            "bias_ptr": "conv_bias",
            "conv_state_ptr": "conv_states",
            "conv_state_indices_ptr": "decodes",
            "num_accepted_tokens_ptr": "accepted",
            "query_start_loc_ptr": "draft_starts",
            "o_ptr": rows,
        },
    }


def present(**tensors: torch.Tensor | None) -> Tensors:
    """Return the tensors that are not None, by name."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def most(device: torch.device) -> int:
    """Return the most bytes of buffers that a step may keep."""
    return _memory(device) // _PART


@cache
def _memory(device: torch.device) -> int:
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return memory


def _addresses(tensors: Tensors) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def _kinds(tensors: Tensors, addresses: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    """Return what a launch depends on, for each tensor, but its address."""
    return {
        name: (
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            addresses[name] % 16,
        )
        for name, tensor in tensors.items()
    }


def _numbers(metadata: Any) -> dict[str, Any]:
    """Return the fields of a layer's metadata that are not tensors.

    Of the sizes by which a convolution is divided, the numbers of programs.
    """
    fields = {name: value for name, value in vars(metadata).items() if not torch.is_tensor(value)}
    if sizes := fields.get("nums_dict"):
        fields["nums_dict"] = {size: each["tot"] for size, each in sizes.items()}
    return fields


def _offset(tensor: torch.Tensor | None, address: int) -> int:
    """Return how far behind a contiguous tensor's begin an address in it is, in bytes."""
    offset: int = 0 if tensor is None else address - tensor.data_ptr()
    if tensor is None or (offset and not (0 < offset < tensor.nbytes and tensor.is_contiguous())):
        raise ValueError("a kernel has another tensor than the layer, such as a copy")
    return offset


def _stream(tensor: torch.Tensor) -> int | None:
    """Return the handle of CUDA's stream; None without CUDA or while a graph is captured."""
    if not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream
