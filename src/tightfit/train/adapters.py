"""LoRA adapters around a skeleton, and the 4-bit weights of QLoRA.

Adapters are made on the meta device like everything else and get their values from `assemble.py`: PEFT would draw them
from the state of the global generator, which differs from engine to engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train.build import DTYPES, body_of, cast_meta
from tightfit.train.config import AdapterSettings
from tightfit.types import ConfigError, Levers, Lora

ReadWhole = Callable[[str, tuple[int, ...]], Tensor]  # a tensor's name and shape → its values, on the host
REFUSED = {name: {"out_proj", "conv1d"} for name in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")}
"""Modules by kind of model that PEFT does not adapt: their kernels read the weights and never call them."""


def add_adapters(model: Any, lora: Lora, settings: AdapterSettings, dtype: torch.dtype) -> Any:
    """The model with adapters around the targets; nothing else trains."""
    from peft import LoraConfig, get_peft_model

    # What the user named, or every linear layer that PEFT can adapt.
    targets: str | list[str] = "all-linear" if lora.targets is None else list(lora.targets)
    if lora.targets is None and (refused := REFUSED.get(model.config.model_type)):
        head = model.get_output_embeddings()
        linear = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
        targets = sorted({name.rpartition(".")[2] for name in linear} - refused)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(Message("train.peft-targets", why=str(error).partition(chr(10))[0])) from error
    cast_meta(adapted, lambda _, param: dtype if param.requires_grad else param.dtype)
    return adapted


def adapter_dtype(levers: Levers) -> torch.dtype:
    """In which precision adapters rest. DeepSpeed keeps fp32 copies of its own, and casts what was not built under
    ZeRO-3's context, as 4-bit models are not; FSDP2's shards are the only ones."""
    assert levers.lora is not None
    if levers.precision == "fp32":
        return torch.float32
    if levers.is_fsdp2:
        return torch.float32 if levers.master_weights else DTYPES[levers.precision]
    if levers.lora.dtype == "fp32" and levers.stage == 3 and levers.method != "qlora":
        return torch.float32
    return DTYPES[levers.precision]


def quantise(model: Any, read: ReadWhole, device: torch.device, compute: torch.dtype) -> None:
    """Replace every linear layer but the head by an NF4 one, a matrix at a time."""
    try:
        import bitsandbytes.nn
    except ImportError:
        raise ConfigError(Message("train.qlora-needs-bitsandbytes")) from None
    layers: Any = bitsandbytes.nn
    body = body_of(model)
    head = body.get_output_embeddings()
    for parent_name, parent in list(body.named_modules()):
        for leaf, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or child is head:
                continue
            name = f"{parent_name}.{leaf}"
            packed = layers.Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=compute,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            whole = read(f"{name}.weight", tuple(child.weight.shape)).to(compute)
            packed.weight = layers.Params4bit(whole, requires_grad=False, quant_type="nf4").to(device)
            packed.quant_state = packed.weight.quant_state  # FSDP2 replaces the parameter, which loses it
            if child.bias is not None:
                bias = read(f"{name}.bias", tuple(child.bias.shape)).to(device, compute)
                packed.bias = nn.Parameter(bias, requires_grad=False)
            packed.register_forward_hook(_let_go_of_weight)
            setattr(parent, leaf, packed)
    body.is_loaded_in_4bit = True
    body.config.quantization_config = None


class _WeightThen:
    """What a node of autograd keeps of a packed matrix, looked up when it is read."""

    def __init__(self, weight: nn.Parameter, kept: Tensor) -> None:
        self._weight, self._view = weight, (kept.shape, kept.stride())

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((None, self._weight.data.as_strided(*self._view)))


def _let_go_of_weight(layer: nn.Module, _: Any, output: Tensor) -> None:
    """`MatMul4Bit` keeps the packed matrix outside `save_for_backward`, under recomputation too: what ZeRO-3 gathered
    and released would stay until the backward pass, all layers of it. For that pass it is gathered again."""
    node: Any = output.grad_fn
    if node is not None and not hasattr(node, "tensors"):
        node = node.next_functions[0][0]  # behind the cast of its output
    weight: Any = layer.weight
    if hasattr(weight, "ds_id") and getattr(node, "tensors", (None, None))[1] is not None:
        node.tensors = _WeightThen(weight, node.tensors[1])
