"""Activation checkpointing: what a layer computes again in its backward pass, whole layers or parts of them.

A layer that recomputes keeps its input and runs forward once more when its backward pass begins. Most of that time
goes into matrix products and attention, and most of the memory that it saves was held by the rest: norms, rotary
embeddings, activations, gates. So `select` names the parts whose products run again (`types.PARTS`); the products of
the others are kept, and elementwise work always runs again.

What counts is not only the product. Of a linear layer with an adapter the sum is kept, not its two terms, since
nothing reads these; and where ranks add up their shares of it (`tensor.py`), what is left to each. In the second pass
the products behind the sum are skipped, and so is a last projection that nothing after it reads. The first matrix of an
adapter keeps its narrow output, which the gradient of the second needs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit.memory.selection import ATTENTIONS, SCANS, Place, is_below_adapter, place_of
from tightfit.memory.tape import SMALLEST_MOVED_BYTES
from tightfit.messages import Message
from tightfit.train.build import body_of, layers_of, number_layers
from tightfit.train.tensor import ADD_UP
from tightfit.types import PARTS, Checkpointing, ConfigError

_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm _grouped_mm _scaled_mm convolution _flash_attention_forward"
    " _efficient_attention_forward _cudnn_attention_forward".split()
)
"""What costs arithmetic among PyTorch's own operations, beside `_scaled_dot_product_…`."""
_OTHERS = frozenset({"gemm_4bit", "gemv_4bit", "grouped_mm_fallback"})
"""Of other libraries: bitsandbytes' products, and transformers' product of experts where PyTorch has none."""
_KERNELS = frozenset({"flash_attn", "flash_attn_3", "tightfit", "mamba_ssm", "causal_conv1d"})
"""Libraries whose operations are all kernels of that kind."""


def recompute(model: Any, how: Checkpointing) -> int:
    """Activation checkpointing: switch it on; the number of layers that recompute.

    Hugging Face's layers checkpoint themselves; the lowest K do so for `layers:K`, of each stage where there are some,
    since what they keep would wait longest. With `full+offload` the inputs go to the host: torch saves them through the
    hooks that are active when the checkpoint is entered, while everything inside goes through the checkpoint's own.
    """
    if how.layers == 0:
        return 0
    body, layers = body_of(model), number_layers(model)
    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wanted = count_whole(model, how)
    if not all(hasattr(layer, "gradient_checkpointing") for _, layer in layers):
        if wanted != len(layers) or how.offload:
            raise ConfigError(Message("train.cannot-recompute-some", model=type(body).__name__))
        return wanted
    layer: Any
    for index, layer in layers:
        layer.gradient_checkpointing = how.layers is None or index < how.layers
        if how.offload:
            layer._gradient_checkpointing_func = on_the_host
        elif how.select and layer.gradient_checkpointing and has_parts(layer):
            layer._gradient_checkpointing_func = Selection(layer, how.select).run
    return wanted


def count_whole(model: Any, how: Checkpointing) -> int:
    """How many layers are to recompute."""
    return sum(how.layers is None or index < how.layers for index, _ in number_layers(model))


def on_the_host(function: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint whose inputs wait in host memory."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not tensor.is_cuda or tensor.numel() * tensor.element_size() < SMALLEST_MOVED_BYTES:
            return tensor.device, tensor
        # Pinned, and on the stream of the computation: the copy is ordered before whatever reuses the memory.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, use_reentrant=False)


Contexts = Callable[[], tuple[Any, Any]]
"""What `torch.utils.checkpoint` takes as its `context_fn`."""


def inside(layer: nn.Module, index: int, how: Checkpointing) -> Contexts | None:
    """For `checkpoint(…, use_reentrant=False, context_fn=…)` inside a layer that is compiled: what of it recomputes.
    None: nothing but what the compiler thinks best. Where some layers recompute, the others recompute their elementwise
    work, which costs a compiled layer next to nothing. Layers that recompute alike get the same function, so that one
    compilation serves all of them."""
    if how.layers == 0:
        return None
    is_above = how.layers is not None and index >= how.layers
    return _tags_for(PARTS[:1] if is_above else how.select) if has_parts(layer) else None if is_above else _tags_for(())


def say_whole(model: Any, how: Checkpointing) -> Message | None:
    """What to say where parts were selected of layers that have none."""
    whole = next((layer for layer in layers_of(model) if how.select and how.layers != 0 and not has_parts(layer)), None)
    return None if whole is None else Message("train.recomputes-whole", kind=type(whole).__name__)


def has_parts(layer: nn.Module) -> bool:
    """Whether each of its matrices belongs to a part; a layer of which that is not known recomputes whole. So does one
    whose adapters are added to the matrices themselves, as PEFT does with stacked experts."""
    return all(
        place_of(name) is not None and type(module).__name__ != "ParamWrapper"
        for name, module in layer.named_modules()
        if hasattr(module, "base_layer") or any(param.dim() > 1 for param in module.parameters(recurse=False))
    )


@lru_cache
def _tags_for(selected: tuple[str, ...]) -> Contexts:
    """As tags on the graph of a compiled layer, which the partitioner cuts in two. What is marked `MUST_SAVE` never
    runs again, and is saved if the backward pass needs it; of what is marked `PREFER_SAVE` the least is saved that
    serves, which is the sum that an adapter makes rather than both terms."""

    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        path, owner = _module_in_graph()
        place = place_of(path) if selected else None
        if place is None or _part(place) in selected or (place == "scan" and not _is_ours(op)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if computes_product(op):
            return CheckpointPolicy.MUST_SAVE
        is_term = _looks(op) if is_below_adapter(path) else owner.startswith("peft.") and _sums_up(op, args)
        return CheckpointPolicy.PREFER_SAVE if is_term else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        made: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return made

    # torch keeps compiled layers apart by the code of the functions that they call, not by what these enclose; and in
    # its cache on disk by this attribute or, before 2.13, by a pickle, which finds a function by its name.
    name = "_".join(("contexts_of", *(selected or ("all",))))
    contexts.__code__, contexts.__qualname__ = contexts.__code__.replace(co_name=name), name
    globals()[name] = contexts
    contexts.cache_hash = f"tightfit recomputes {selected}"  # type: ignore[attr-defined]
    return contexts


def _module_in_graph() -> tuple[str, str]:
    """The innermost module around the operation that is being traced: its path, and where its class is defined."""
    stack = traceback.get_current_meta().get("nn_module_stack")
    if not stack:
        return "", ""
    path, owner = list(stack.values())[-1]
    return path, owner if isinstance(owner, str) else owner.__module__


@lru_cache(maxsize=4096)
def computes_product(op: Any) -> bool:
    """A matrix product, a convolution or attention, whatever kernel computes it."""
    if not isinstance(op, OpOverload):
        return "attention" in op.name()  # flex_attention
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "aten":
        return name in _PRODUCTS or name.startswith("_scaled_dot_product_")
    return namespace in _KERNELS or name in _OTHERS


@lru_cache(maxsize=4096)
def _looks(op: Any) -> bool:
    """A view, also one that autograd takes for a tensor of its own."""
    return isinstance(op, OpOverload) and (op.is_view or op._schema.name == "aten::_unsafe_view")


def _part(place: Place) -> str:
    return "mlp" if place == "down" else "mixer" if place == "scan" else place


_SUMS = frozenset({f"aten::{name}" for name in ("mul", "add", "clone", "_to_copy")})


def _sums_up(op: Any, args: tuple[Any, ...]) -> bool:
    """What PEFT computes of both products: a copy of the first (4-bit), the second times a constant, their sum, and
    casts back; not the cast of the input, which goes to a wider type."""
    name = op._schema.name if isinstance(op, OpOverload) else ""
    return name in _SUMS and (name != "aten::_to_copy" or args[0].dtype == torch.float32)


@lru_cache(maxsize=4096)
def _is_ours(op: Any) -> bool:
    return isinstance(op, OpOverload) and op.namespace == "tightfit"


@lru_cache(maxsize=4096)
def _unpacks(op: Any) -> bool:
    """A 4-bit matrix, for a product."""
    return isinstance(op, OpOverload) and op.namespace == "bitsandbytes" and "dequantize" in op._schema.name


@lru_cache(maxsize=4096)
def _always_runs(op: Any) -> bool:
    """Whatever module it belongs to. Most operations are of that kind, and Python sees every one of them."""
    changes = isinstance(op, OpOverload) and op._schema.name in (*_SUMS, "aten::add_")
    return not (changes or computes_product(op) or _is_ours(op) or _unpacks(op))


Role = Literal["plain", "share", "sum", "base", "dropout", "first", "second"]
"""Of a module that computes products: one without an adapter; one whose product is a share of sums that ranks add up;
PEFT's, around what follows; the one that is adapted; what drops a share of the adapter's input; its two matrices."""
Fate = Literal["run", "keep", "skip", "sum", "join"]
"""Of an operation when the layer runs again. `skip`: nothing reads what it computes. `sum`: only the last of these is
kept, in the precision of the layer. `join`: it changes in place what was kept, and did so the first time."""


class Selection:
    """A layer of which some parts recompute, where it is not compiled: torch's checkpoint with two passes of our own.

    torch's selective checkpointing numbers every operation and wants the same numbers the second time. But engines
    gather weights in the middle of a layer, in one pass and not in the other, and what an adapter sums up would be kept
    in two terms. So only what is kept or skipped is counted here. Hooks tell which module an operation belongs to,
    except in a mixer that runs a scan: hooks on its modules would keep it from fusing them.
    """

    def __init__(self, layer: nn.Module, selected: tuple[str, ...]) -> None:
        self._selected = selected
        self._needless = {
            place
            for place, needless in {"down": not _reads_down(layer), "out": not _reads_out(layer)}.items()
            if needless
        }
        self.running: list[tuple[Place, Role]] = []
        """The modules that are, the innermost last."""
        self._unhooked: Any = None

        def leave(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.running.pop()

        for name, module in layer.named_modules():
            place, role = place_of(name), _role_of(name, module)
            if place is None or role is None:
                continue
            if role == "plain" and not SCANS.isdisjoint(name.split(".")):
                self._unhooked = module if place == "qkv" and name.endswith("in_proj") else self._unhooked
                continue

            def enter(module: Any, *_: Any, entered: tuple[Place, Role] = (place, role)) -> None:
                if not torch.compiler.is_compiling():
                    is_shared = entered[1] == "plain" and hasattr(module, "has_shares")
                    self.running.append((entered[0], "share") if is_shared else entered)

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, context_fn=self.contexts)

    def contexts(self) -> tuple[Any, Any]:
        record: deque[_Entry] = deque()
        return _FirstPass(self, record), _SecondPass(self, record)

    def fate_of(self, op: Any, args: tuple[Any, ...]) -> Fate:
        if not self.running:
            if _is_ours(op):
                return "run" if "mixer" in self._selected else "keep"
            is_first = "qkv" not in self._selected and computes_product(op) and self._reads_in_proj(args)
            return "keep" if is_first else "run"
        place, role = self.running[-1]
        again, needless = _part(place) in self._selected, place in self._needless
        if (again and not needless) or role == "dropout":
            return "run"
        if op is ADD_UP:
            return "skip" if needless else "sum"
        if role == "sum":
            return "run" if not _sums_up(op, args) else "skip" if needless else "sum"
        if computes_product(op):
            if role == "first":
                return "run" if again else "keep"
            return "skip" if needless or role != "plain" else "keep"
        if role in ("plain", "base") and _unpacks(op):
            return "skip"
        return "join" if role in ("plain", "base") and op is torch.ops.aten.add_.Tensor and place != "mixer" else "run"

    def _reads_in_proj(self, args: tuple[Any, ...]) -> bool:
        if self._unhooked is None:
            return False
        weight = self._unhooked.weight.untyped_storage()._cdata
        return any(isinstance(each, Tensor) and each.untyped_storage()._cdata == weight for each in args)


_ADAPTER_ROLES: dict[str, Role] = {"lora_dropout": "dropout", "lora_A": "first", "lora_B": "second"}


def _role_of(name: str, module: nn.Module) -> Role | None:
    names = name.split(".")
    if isinstance(getattr(module, "base_layer", None), nn.Module):
        return "sum"
    if names[-1] == "base_layer":
        return "base"
    if names[-2:-1] and names[-2] in _ADAPTER_ROLES:
        return _ADAPTER_ROLES[names[-2]]
    has_matrix = any(param.dim() > 1 for param in module.parameters(recurse=False))
    return "plain" if has_matrix or names[-1] in ATTENTIONS else None


def _reads_down(layer: nn.Module) -> bool:
    """Whether anything reads the output of the layer's last projection but an addition: a norm after it, or a router's
    weight. Of a layer with other norms than the usual two it is taken for granted."""
    names = [name for name, _ in layer.named_modules()]
    norms = [name for name, _ in layer.named_children() if re.search(r"norm|^ln_", name)]
    after = any(re.search(r"post_(feedforward|mlp|ff\w)_?(layer)?norm", name) for name in norms)
    return after or len(norms) != 2 or any("experts" in name.split(".") for name in names)


def _reads_out(layer: nn.Module) -> bool:
    """Whether anything reads the output of the mixer's last projection but the layer's last addition."""
    has_feed = any(place_of(name) in ("mlp", "down") for name, _ in layer.named_modules())
    return has_feed and not getattr(layer, "use_parallel_residual", False)


@dataclass(slots=True)
class _Blank:
    """A tensor that nothing reads: as it looks, without numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _blank(tensor: Tensor) -> _Blank:
    return _Blank(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(slots=True)
class _Entry:
    """Of one operation that does not run again: what it returns then."""

    op: Any
    outputs: Any  # as the operation returns them: tensors that are kept, or blanks
    version: int  # how often these have been changed in place
    generator: Tensor | None = None  # the state of the device's generator after it, where it draws numbers

    def let_go(self) -> None:
        self.outputs = tree_map_only(Tensor, _blank, self.outputs)


class _Pass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing in here is compiled, so that torch need not be told before each operation."""
        return False

    def __init__(self, selection: Selection, record: deque[_Entry]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selection, self._record = selection, record
        self._latest: Any = None
        """What the last operation that does not run again has returned."""

    def __enter__(self) -> Any:
        self._selection.running.clear()
        self._latest = None
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _joins(self, target: Tensor) -> bool:
        latest = self._latest
        return isinstance(latest, Tensor) and target.untyped_storage()._cdata == latest.untyped_storage()._cdata


class _FirstPass(_Pass):  # type: ignore[no-untyped-call]
    """Keeps what is not to run again."""

    _result_dtype: torch.dtype | None = None
    _sum: _Entry | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _always_runs(op):
            return op(*args, **(kwargs or {}))
        fate = self._selection.fate_of(op, args)
        joins = fate == "join" and self._joins(args[0])
        out = op(*args, **(kwargs or {}))
        if joins:
            self._record[-1].version = _version(self._record[-1].outputs)
        if fate in ("run", "join"):
            return out
        kept = out.detach() if isinstance(out, Tensor) else tree_map_only(Tensor, Tensor.detach, out)
        entry = _Entry(op, kept, 0)
        self._record.append(entry)
        self._latest = entry.outputs
        if fate == "skip":
            if self._selection.running[-1][1] in ("base", "share"):
                self._result_dtype, self._sum = out.dtype, None
            entry.let_go()
        elif fate == "sum" and out.dtype != self._result_dtype:
            entry.let_go()
        elif fate == "sum":
            if self._sum is not None:
                self._sum.let_go()
            self._sum = entry
        elif op._schema.name == "tightfit::mixer":  # of what it returns the layer adds the first to its input
            entry.outputs = (_blank(out[0]), *entry.outputs[1:])
        entry.version = _version(entry.outputs)
        if fate == "keep" and _draws(op, args, kwargs or {}):
            entry.generator = _random_of(self._latest).get_state()
        return out


class _SecondPass(_Pass):  # type: ignore[no-untyped-call]
    """Hands out what was kept, in the same order."""

    def __init__(self, selection: Selection, record: deque[_Entry]) -> None:
        super().__init__(selection, record)
        self._blanks: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # one element each, whatever their shapes
        self._storages: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _always_runs(op) and (not self._storages or _looks(op)):
            return op(*args, **(kwargs or {}))
        fate = self._selection.fate_of(op, args)
        blanks = self._storages if fate in ("run", "join", "keep") else set()
        if blanks and any(isinstance(each, Tensor) and each.untyped_storage()._cdata in blanks for each in args):
            if fate == "join":
                return args[0]
            if op in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor):  # a bias, the mask of a dropout
                shapes = [each.shape for each in args if isinstance(each, Tensor)]
                shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
                return self._make(_Blank(shape, torch.result_type(args[0], args[1]), args[0].device))
            if fate == "keep" or op._schema.name not in ("aten::native_dropout", "aten::empty_like"):
                raise RuntimeError(f"a layer reads what it was not to compute again: {op}")
        if fate == "join" and self._joins(args[0]):
            return args[0]
        if fate in ("run", "join"):
            return op(*args, **(kwargs or {}))
        entry = self._record.popleft() if self._record else None
        if entry is None or entry.op is not op or entry.version != _version(entry.outputs):
            raise RuntimeError(f"a layer recomputes otherwise than it ran: {op} in the place of {entry and entry.op}")
        if entry.generator is not None:
            _random_of(entry.outputs).set_state(entry.generator)
        self._latest = tree_map_only(_Blank, self._make, entry.outputs)
        return self._latest

    def _make(self, blank: _Blank) -> Tensor:
        kind = blank.dtype, blank.device
        if kind not in self._blanks:
            self._blanks[kind] = torch.empty((), dtype=blank.dtype, device=blank.device)
            self._storages.add(self._blanks[kind].untyped_storage()._cdata)
        return self._blanks[kind].expand(blank.shape)


def _version(outputs: Any) -> int:
    return sum(each._version for each in tree_leaves(outputs) if isinstance(each, Tensor))


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention with dropout: the masks that are drawn after it have to be the same without it."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0) > 0)


def _random_of(outputs: Any) -> torch.Generator:
    device = next(each.device for each in tree_leaves(outputs) if isinstance(each, Tensor))
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
