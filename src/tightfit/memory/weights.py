"""The parameters as an engine sees them: what trains, what is frozen, in which bytes, in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tightfit.memory.operations import UNADAPTABLE
from tightfit.types import Block, Levers, Lora, ModelShape, Tensor, Trains

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}

# NF4 as bitsandbytes lays it out: half a byte an element, and for each block of 64 elements a scale that
# double quantisation stores in one byte, with one fp32 scale for every 256 of those.
NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Everything is in elements unless it says bytes. Compared by identity: `weights` makes each but once, and what is
    remembered for one is then found without looking at every parameter."""

    trainable: tuple[int, ...]  # each trainable parameter, in the order of `model.parameters()`
    frozen: tuple[int, ...]  # each frozen parameter that is not quantised
    trainable_numel: int
    frozen_bytes: int  # of everything frozen, quantised weights included
    quantised_bytes: int
    quantised_numel: int
    scales_bytes: int  # the part of `quantised_bytes` that no engine shards
    width: int
    trainable_width: int  # bytes of a trainable element on the GPU
    largest_trainable: int
    largest_frozen: int
    largest_quantised: int

    @property
    def bytes(self) -> int:
        return self.frozen_bytes + self.trainable_numel * self.trainable_width


@lru_cache(maxsize=512)
def weights(
    shape: ModelShape, method: str, lora: Lora | None, precision: str, frozen_layers: int, trains: Trains = "all"
) -> Weights:
    width, base_trains = WIDTH[precision], method == "full" and trains != "embeddings"
    trainable: list[int] = []
    frozen: list[int] = []
    quantised: list[int] = []
    kinds = [layer_parameters(block, method, lora) for block in shape.blocks]
    for tensor in shape.before:
        (trainable if method == "full" and trains != "layers" and frozen_layers == 0 else frozen).append(tensor.numel)
    for index, kind in enumerate(shape.pattern):
        base, adapters, packed = kinds[kind]
        if method == "full":
            (trainable if base_trains and index >= frozen_layers else frozen).extend(base)
            continue
        frozen.extend(base)
        quantised.extend(packed)
        if index >= frozen_layers:
            trainable.extend(adapters)
    for tensor in shape.after:
        (trainable if base_trains else frozen).append(tensor.numel)
    scales = sum(map(scale_bytes, quantised))
    packed_bytes = sum(quantised) // 2 + scales
    adapter_width = {"bf16": min(2, width), "fp32": 4}[lora.dtype] if lora else width
    return Weights(
        trainable=tuple(trainable),
        frozen=tuple(frozen),
        trainable_numel=sum(trainable),
        frozen_bytes=sum(frozen) * width + packed_bytes,
        quantised_bytes=packed_bytes,
        quantised_numel=sum(quantised),
        scales_bytes=scales,
        width=width,
        trainable_width=width if method == "full" else adapter_width,
        largest_trainable=max(trainable, default=0),
        largest_frozen=max((*frozen, *quantised), default=0),
        largest_quantised=max(quantised, default=0),
    )


def of(shape: ModelShape, levers: Levers) -> Weights:
    """What an engine cuts up: a part of each, where ranks share layers."""
    return _cut(of_whole_model(shape, levers), levers.tensor_parallel)


def of_whole_model(shape: ModelShape, levers: Levers) -> Weights:
    return weights(shape, levers.method, effective_lora(levers), levers.precision, levers.frozen_layers, levers.trains)


@lru_cache(maxsize=512)
def _cut(whole: Weights, ranks: int) -> Weights:
    """Nothing that is packed: no ranks share that."""
    if ranks == 1:
        return whole
    trainable, frozen = (tuple([-(-numel // ranks) for numel in each]) for each in (whole.trainable, whole.frozen))
    return replace(
        whole,
        trainable=trainable,
        frozen=frozen,
        trainable_numel=sum(trainable),
        frozen_bytes=sum(frozen) * whole.width,
        largest_trainable=max(trainable, default=0),
        largest_frozen=max(frozen, default=0),
    )


def scale_bytes(numel: int) -> int:
    """Of a matrix that is packed into 4 bits."""
    return -(-numel // NF4_BLOCK) + 4 * -(-numel // (NF4_BLOCK * NF4_NESTED_BLOCK))


def effective_lora(levers: Levers) -> Lora | None:
    """DeepSpeed casts every parameter to the working precision, adapters too, unless `zero.Init` built the model.
    FSDP2's adapters rest in fp32 and are computed with in the working precision."""
    lora = levers.lora
    if lora is None or levers.precision == "fp32" or levers.stage == 3:
        return lora
    return lora if lora.dtype == "bf16" else replace(lora, dtype="bf16")


def layer_parameters(block: Block, method: str, lora: Lora | None) -> tuple[list[int], list[int], list[int]]:
    """Parameters that stay as they are, adapters, and matrices that are packed into 4 bits."""
    base: list[int] = []
    adapters: list[int] = []
    packed: list[int] = []
    for tensor in block.tensors:
        (packed if method == "qlora" and is_linear(tensor) else base).append(tensor.numel)
        if lora is not None and is_adapted(tensor, lora):
            out_features, in_features = tensor.shape
            adapters += [lora.rank * in_features, out_features * lora.rank]
    if lora is not None and lora.targets is None and block.lora_on_experts:
        # PEFT's `all-linear` also takes a router and fused experts that are bare parameters: a pair for each expert
        for tensor in block.tensors:
            if tensor.name.startswith("mlp.") and "shared" not in tensor.name and not is_linear(tensor):
                experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
                rank = (2 if "gate_up" in tensor.name else 1) * lora.rank * experts
                adapters += [rank * tensor.shape[-1], rank * tensor.shape[-2]]
    return base, adapters, packed


def is_linear(tensor: Tensor) -> bool:
    """A linear layer's matrix; a router is a bare parameter, a convolution has three dimensions."""
    return tensor.is_linear and not tensor.name.endswith(("mlp.gate.weight", "router.weight"))


def is_adapted(tensor: Tensor, lora: Lora) -> bool:
    if not is_linear(tensor):
        return False
    if lora.targets is None:
        return not tensor.name.startswith(UNADAPTABLE)
    return tensor.name.rsplit(".", 2)[-2] in lora.targets
