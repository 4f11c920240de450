"""Measure a model that nobody described: `python -m tightfit.train.trace config.json` prints JSON.

transformers builds the model on the meta device, where tensors have shapes but no memory, so a model of
any size costs seconds. The parameter list is read off it. Its layers are then run one kind at a time,
forward and backward, with an account of every storage that is alive:

- a first pass through the model stops at the first layer of the last new kind; on the way it notes with
  which arguments each kind is called;
- each noted layer runs alone under a dispatch mode that adds up storages as operators return them and
  takes them off as they die;
- this is done for two sequence lengths with the same sequence of operators. The difference between the two
  accounts, moment by moment, is what a token costs at that moment: whatever does not grow with the
  sequence (weights' gradients, masks of fixed size) cancels. A third length shows whether growth is linear.

What comes out, for each kind of layer, in bytes a token:

- saved: distinct storages that autograd keeps for the backward pass, parameters and buffers left out, the
  layer's input counted if it is among them;
- forward: the most that is held at once while the layer runs forward, its input and what it saves included;
- backward: the same while it runs backward, with the gradients of its output and input, without those of
  its weights.

Attention calls the fused kernel's operator directly, as on a GPU: on the meta device torch would choose the
plain formula, which keeps a square matrix a head. Where a model has an attention of its own, or a kernel
that only exists on GPUs, the plain path is measured, and a note says so.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tightfit.messages import Message, as_json, message_of

torch: Any = None  # as Any, because much of what is used here is untyped
transformers: Any = None
with suppress(ImportError):  # their absence is an answer, not a crash
    torch, transformers = import_module("torch"), import_module("transformers")
STEP = 256  # sequence lengths are 1, 2 and 4 of it: a multiple of the chunks in which state-space models work
ATTENTION = "tightfit_fused"
"""How the fused operator is registered. A name with 'flash' in it would make transformers look for that package."""


Account = dict[Literal["saved", "forward", "backward"], list[int]]
"""One layer at one length, in bytes: all that is saved; held after each operator, the layer's input included."""


class TraceError(Exception):
    """The model cannot be measured."""


def main(arguments: Sequence[str]) -> int:
    try:
        answer = {"error": {"kind": "missing"}} if torch is None else trace(Path(arguments[0]))
    except TraceError as error:
        answer = {"error": {"kind": "failed", "message": as_json(message_of(error))}}
    sys.stdout.write(json.dumps(answer, default=as_json) + "\n")
    return 0


def trace(path: Path) -> dict[str, Any]:
    """Everything the desk needs to know about the model of this config.json. The fused attention is tried first, then
    what the model brings itself; the first that runs is it."""
    transformers.utils.logging.set_verbosity_error()
    problem: Exception | None = None
    for attention in (ATTENTION, "sdpa", "eager"):
        try:
            answer = _measure(_build(path, attention))
            if attention != ATTENTION:
                answer["notes"].append(Message("train.attention-measured", attention=attention))
            return answer
        except TraceError:
            raise
        except Exception as error:  # foreign code, on a device it was not written for
            problem = error
    raise TraceError(f"{type(problem).__name__}: {problem}")


def _measure(model: Any) -> dict[str, Any]:
    # Where the list of modules lives that holds most of the parameters.
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise TraceError(Message("train.trace-no-layers"))
    stem, all_layers = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    # Names and shapes of all parameters: before the layers, of each layer, after the layers.
    before: list[Any] = []
    after: list[Any] = []
    tensors: list[list[Any]] = [[] for _ in all_layers]
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if name.startswith(f"{stem}."):
            index, _, rest = name.removeprefix(f"{stem}.").partition(".")
            tensors[int(index)].append([rest, shape])
        else:
            (after if any(tensors) else before).append([name, shape])
    # For each layer its kind, and for each kind the first layer of it. Weights shared between layers count once.
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    keys = []
    for i, layer in enumerate(all_layers):
        modules = [type(module).__name__ for module in layer.modules()]
        keys.append(json.dumps([modules, tensors[i], types[i] if i < len(types) else None]))
    kinds = list(dict.fromkeys(keys))
    representatives = [keys.index(kind) for kind in kinds]
    costs, notes = _costs(model, [all_layers[i] for i in representatives])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # LayerNorm or one of the RMS norms, by the name of the last norm in the model.
    norms = [type(module).__name__.lower() for module in model.modules() if "norm" in type(module).__name__.lower()]
    return {
        "model_type": config.model_type,
        "hidden_size": getattr(config, "hidden_size", embedding.weight.shape[1]),
        "vocab_size": embedding.weight.shape[0],
        "max_positions": getattr(config, "max_position_embeddings", None),
        "tied": head is not None and head.weight is embedding.weight,
        "layer_prefix": f"{stem}.{{i}}.",
        "pattern": [kinds.index(key) for key in keys],
        "kinds": [{"tensors": tensors[i], **cost} for i, cost in zip(representatives, costs, strict=True)],
        "before": before,
        "after": after,
        "norm": "layer" if norms and "layernorm" in norms[-1] else "rms",
        "notes": notes,
        "transformers": transformers.__version__,
    }


def _build(path: Path, attention: str) -> Any:
    transformers.AttentionInterface.register(ATTENTION, _attend)
    if attention != ATTENTION:
        # Masks are built by looking at their values, unless under tracing; on the meta device there are none.
        transformers.masking_utils.is_tracing = lambda *_: True
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        raise TraceError(Message("train.trace-config", why=error)) from error
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise TraceError(Message("train.trace-no-model", model_type=config.model_type))
    with torch.device("meta"):
        maker = transformers.AutoModelForCausalLM
        return maker.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)


def _attend(  # transformers calls it with its own names
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    if query.shape[-1] == value.shape[-1]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        output = operator(query, key, value, 0.0, True, False, scale=scaling)[0]
    else:  # multi-head latent attention: only the memory-efficient kernel takes values of another width
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        output = operator(query, key, value, None, True, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def _costs(model: Any, layers: list[Any]) -> tuple[list[dict[str, int]], list[Message]]:
    """Bytes a token for each layer, and notes. The first two lengths give the slope, the third judges it."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4 * STEP
    step = max(1, min(STEP, positions // 4))
    calls = [_capture(model, layers, times * step) for times in (1, 2, 4)]
    costs, bent = [], False
    for i, layer in enumerate(layers):
        short, longer, longest = (_account(layer, *call[i]) for call in calls)
        costs.append({f"{name}_bytes_per_token": _slope(short[name], longer[name], step) for name in short})
        few, more, most = (sum(each["saved"]) for each in (short, longer, longest))
        bent = bent or most - more > 1.01 * 2 * (more - few)
    return costs, [Message("train.trace-grows", length=2 * step)] if bent else []


def _slope(short: Sequence[int], longer: Sequence[int], step: int) -> int:
    """The largest growth of any moment; of the peaks, where a loop over the sequence shifts the moments."""
    if len(short) != len(longer):
        short, longer = [max(short)], [max(longer)]
    return max(0, *(-((a - b) // step) for a, b in zip(short, longer, strict=True)))


class _AllSeen(Exception):
    """Every kind of layer has been called."""


def _capture(model: Any, layers: list[Any], length: int) -> dict[int, tuple[tuple[Any, ...], dict[str, Any]]]:
    """With what the model calls these layers."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(layers.index(layer), (args, kwargs))
        if len(calls) == len(layers):
            raise _AllSeen

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    model.eval()  # in training, some models roll dice about which layers to skip
    model.config.pad_token_id = None  # or some look for it among the tokens, which have no values here
    try:
        with torch.device("meta"):
            model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    except _AllSeen:
        return calls
    finally:
        for handle in handles:
            handle.remove()
    raise TraceError(Message("train.trace-uncalled"))


def _account(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Account:
    """Run one layer forward and backward and keep the books."""

    def fresh(value: Any) -> Any:
        """The residual stream becomes a leaf, so that backward ends at this layer."""
        return value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.requires_grad else value

    layer.train()
    args, kwargs = torch.utils._pytree.tree_map(fresh, (args, kwargs))
    given = _tensors_in((args, kwargs))
    inputs = {_address(value): value.untyped_storage().nbytes() for value in given if value.requires_grad}
    constant = [value for value in given if not value.requires_grad]  # rotary angles, say: one for all layers
    outside = {_address(value) for value in (*layer.parameters(), *layer.buffers(), *constant)}
    ledger = _make_ledger(outside | set(inputs), sum(inputs.values()))
    # Weakly: what a branch of the graph that leads nowhere saved, dies with it before the layer ends.
    saved: Any = weakref.WeakValueDictionary()

    def pack(tensor: Any) -> Any:
        if _address(tensor) not in outside:
            saved[_address(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.device("meta"), ledger:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(*args, **kwargs)
        end = _leave([value for value in _tensors_in(output) if value.requires_grad])
        del output
        saved_bytes = sum(storage.nbytes() for storage in saved.values())
        forward, ledger.moments = ledger.moments, []
        end.backward()
    layer.zero_grad(set_to_none=True)
    return {"saved": [saved_bytes], "forward": forward, "backward": ledger.moments}


def _tensors_in(tree: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: Any) -> int:
    """Which storage: views share it. On the meta device all data pointers are null, but this one is not."""
    return int(tensor.untyped_storage()._cdata)


def _make_ledger(known: set[int], start: int) -> Any:
    """A dispatch mode that knows at each operator how many bytes are alive. `known` storages are not counted."""
    mode: Any = torch.utils._python_dispatch.TorchDispatchMode

    class Ledger(mode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.alive = start
            self.moments: list[int] = [start]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for storage in (value.untyped_storage() for value in _tensors_in(result)):
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    self.alive += storage.nbytes()
                    weakref.finalize(storage, self.leave, storage._cdata, storage.nbytes())
            self.moments.append(self.alive)
            return result

        def leave(self, address: int, size: int) -> None:
            known.discard(address)
            self.alive -= size

    return Ledger()


def _leave(outputs: list[Any]) -> Any:
    """A scalar that depends on the outputs without keeping them; backward, it makes their gradients. In a model the
    layer's output lives on only where the next layer saves it, and is counted there."""

    class Leave(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
            return tensors[0].new_empty(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)

    return Leave.apply(*outputs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
