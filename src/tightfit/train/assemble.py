"""From a plan's orders to an engine that is ready to train.

One path for all: a skeleton, frozen and adapted as the job says; shards on the device; values into the shards. What
differs is only when a parameter is cut: ZeRO-3 cuts while it builds, FSDP2 cuts the skeleton, the other stages keep
parameters whole. 4-bit weights are quantised a matrix at a time before anything is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train import build
from tightfit.train.adapters import adapter_dtype, add_adapters, quantise
from tightfit.train.compiled import report_meanwhile
from tightfit.train.config import WorkerConfig
from tightfit.train.deepspeed_checkpoint import DeepSpeedCheckpoint
from tightfit.train.engines import Engine
from tightfit.train.events import Events
from tightfit.train.fill import Origin, fill, fill_buffers
from tightfit.train.place import Place
from tightfit.train.recompute import recompute
from tightfit.train.scratch import Scratch
from tightfit.train.shards import plain_name
from tightfit.train.sources import WeightSource, open_weights
from tightfit.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Assembled:
    engine: Engine
    hf_config: Any
    twin: Any
    """The same model without adapters on the meta device: names and shapes for saving."""
    recomputed: int
    oddities: tuple[Message, ...]
    said: tuple[Message, ...]


class SeededWeights:
    """Weights from the seed, under Hugging Face's names, whatever stands around them."""

    def __init__(self, twin: nn.Module, seed: int) -> None:
        self._scratch = Scratch(twin, seed)
        self._paths = {plain_name(path): path for path, _ in twin.named_parameters(remove_duplicate=False)}

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        return self._scratch.read(self._paths.get(name, name), shape, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Folders that values are read from."""

    weights: Path | None
    """Of the model that the job names; None: its weights are drawn."""
    checkpoint: Path | DeepSpeedCheckpoint | None
    """A checkpoint whose weights take their place."""
    cache: Path


def assemble(config: WorkerConfig, place: Place, found: Origins, events: Events) -> Assembled:
    """The engine, with every parameter filled."""
    levers = config.levers
    if levers.engine == "zero0" and levers.precision == "fp16":
        raise ConfigError(Message("train.zero0-fp16"))
    if not levers.is_fsdp2 and levers.precision == "fp16":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise ConfigError(Message("train.deepspeed-fp16"))
    hf = build.hf_config(config.model, found.weights)
    kernel, said = build.attention_of(levers, place.on_gpu, hf)
    scan_said = build.install_scan(hf.model_type, levers)
    with build.quiet_transformers():
        assembly = _ModelAssembly(config, place, hf, kernel)
        twin = assembly.skeleton()
        source: WeightSource | None = None
        if isinstance(found.checkpoint, DeepSpeedCheckpoint):
            source = found.checkpoint.name_for(twin, adapters=False)
        elif (folder := found.checkpoint or found.weights) is not None:
            source = open_weights(folder, twin, found.cache, progress=events.report)
        engine, oddities, recomputed = assembly.engine(twin, source, events)
    return Assembled(
        engine=engine,
        hf_config=hf,
        twin=twin,
        recomputed=recomputed,
        oddities=oddities,
        said=tuple(sentence for sentence in (said, scan_said) if sentence),
    )


class _ModelAssembly:
    def __init__(self, config: WorkerConfig, place: Place, hf: Any, kernel: Any) -> None:
        self.config, self.place, self.hf, self.kernel = config, place, hf, kernel
        self.levers = config.levers
        self.working = build.DTYPES[self.levers.precision]

    def skeleton(self) -> Any:
        trusted = self.config.model.trust_remote_code
        return build.skeleton(self.hf, self.working, self.kernel, trust_remote_code=trusted)

    def adapt(self, model: Any) -> Any:
        if self.levers.lora is None:
            return model
        assert self.config.adapters is not None
        return add_adapters(model, self.levers.lora, self.config.adapters, adapter_dtype(self.levers))

    def rests_in(self, name: str, param: nn.Parameter) -> torch.dtype:
        return param.dtype if ".lora_" in name else build.rests_in(self.levers, trains=param.requires_grad)

    def engine(self, twin: Any, source: WeightSource | None, events: Events) -> tuple[Engine, tuple[Message, ...], int]:
        drawn = twin if self.levers.lora is None else self.adapt(self.skeleton())
        origin = Origin(draws=SeededWeights(drawn, self.config.training.seed), weights=source, rounding=self.working)
        zero3 = self.levers.stage == 3 and self.levers.method != "qlora"
        model = self.skeleton()
        oddities = build.audit(model, lambda *_: self.working)
        if zero3:
            assert self.config.deepspeed is not None
            trusted = self.config.model.trust_remote_code
            model = build.partition(model, self.kernel, self.config.deepspeed, trust_remote_code=trusted)
        if source is not None:
            fill_buffers(model, source)
        build.freeze(model, self.levers)
        if self.levers.method == "qlora":
            quantise(model, origin.whole, self.place.device, self.working)
        model = self.adapt(model)
        if not zero3:
            build.cast_meta(model, self.rests_in)
        recomputed = recompute(model, self.levers.checkpointing)
        progress = events.progress(Message("train.reading-weights"))
        if self.levers.is_fsdp2:
            from tightfit.train.engines.fsdp2 import Fsdp2, shard

            rests = torch.device("cpu") if self.levers.offload_param != "none" else self.place.device
            if self.levers.method == "qlora":  # packed weights cannot be cut before they are packed
                materialise(model, self.place.device)
                fill(model, origin, self.place.rank, progress)
                shard(model, self.levers, self.place)
            else:
                shard(model, self.levers, self.place)
                materialise(model, rests)
                fill(model, origin, self.place.rank, progress)
            for module in model.modules():
                for leaf, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[leaf] = buffer.to(self.place.device)
            return Fsdp2(model, self.levers, self.place, self.config.training), oddities, recomputed
        materialise(model, self.place.device)
        fill(model, origin, self.place.rank, progress)
        with report_meanwhile(Message("train.starting-deepspeed"), events.doing):
            from tightfit.train.engines.deepspeed import DeepSpeed

            assert self.config.deepspeed is not None
            decay = self.config.training.weight_decay
            return DeepSpeed(model, self.config.deepspeed, self.levers, self.place, decay), oddities, recomputed


def materialise(model: nn.Module, device: torch.device) -> None:
    """Memory for every parameter that is still on the meta device, and buffers on the device; values come later."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for leaf, param in list(module._parameters.items()):
            if param is None or param.device.type != "meta":
                continue
            if param not in made:
                empty = torch.empty_like(param, device=device)
                made[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            module._parameters[leaf] = made[param]
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)
