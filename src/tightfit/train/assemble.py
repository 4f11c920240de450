"""From a plan's orders to an engine that is ready to train.

One path for all: a skeleton, frozen and adapted as the job says; shards on the device; values into the shards. What
differs is only when a parameter is cut: ZeRO-3 cuts while it builds, FSDP2 cuts the skeleton, the other stages keep
parameters whole. 4-bit weights are quantised a matrix at a time before anything is cut.

Values are read in pieces, so that the host never holds more than one, and rounded to the working precision even where
the part rests in fp32: DeepSpeed makes its fp32 copies from 16-bit weights, so only a model that every engine rounds
is the same model on each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightfit.messages import Message, Said, say_why
from tightfit.train import build
from tightfit.train.compile import Compiler, find_obstacle, keep_code
from tightfit.train.config import WorkerConfig
from tightfit.train.deepspeed_checkpoint import DeepSpeedCheckpoint
from tightfit.train.engines import Engine
from tightfit.train.events import Events
from tightfit.train.kernels import install_kernels
from tightfit.train.loss import try_kernels
from tightfit.train.place import Place
from tightfit.train.recompute import count_whole, recompute, say_whole
from tightfit.train.safetensors_files import Files
from tightfit.train.scratch import Scratch
from tightfit.train.shards import Columns, outline
from tightfit.train.sources import open_weights
from tightfit.train.stages import Stages, cut
from tightfit.train.streaming import Packed, place_model
from tightfit.train.tiles import tile_mlps
from tightfit.types import DDP, Checkpointing, ConfigError

PIECE_ELEMENTS = 1 << 24


class TensorSource(Protocol):
    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Assembled:
    engine: Engine
    hf_config: Any
    twin: Any  # the same model without adapters on the meta device: names and shapes for saving
    whole: Any  # the same model with its adapters, of which this rank may have some layers alone
    buffers: Mapping[str, torch.dtype]  # of the whole model, as their authors chose
    recomputed: int  # layers that run once more in the backward pass
    within: int  # and those that do so inside their compiled code
    compiler: Compiler | None  # None: layers run as they are written
    said: tuple[Message, ...]


def assemble(
    config: WorkerConfig,
    place: Place,
    events: Events,
    weights: Path | None,
    checkpoint: Path | DeepSpeedCheckpoint | None,
    cache: Path,
    files: Files | None = None,
) -> Assembled:
    """The engine, with every parameter filled. `weights`: of the model that the job names; None: they are drawn.
    `checkpoint`: one whose weights take their place; `files`: of that one, where they are not plain ones."""
    levers = config.levers
    if levers.engine == "zero0" and levers.precision == "fp16":
        raise ConfigError(Message("train.zero0-fp16"))
    if levers.uses_deepspeed and levers.precision == "fp16":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise ConfigError(Message("train.deepspeed-fp16"))
    hf = build.hf_config(config.model, weights)
    kernel, said = build.attention_of(levers, place.on_gpu, hf)
    scan_said = build.install_scan(hf.model_type, levers)
    working, method = build.DTYPES[levers.precision], levers.method
    trusted = config.model.trust_remote_code
    zero3 = levers.stage == 3 and method != "qlora"

    def skeleton() -> Any:
        return build.skeleton(hf, working, kernel, trust_remote_code=trusted)

    def adapt(model: Any) -> Any:
        if levers.lora is None:
            return model
        assert config.adapters is not None
        return build.add_adapters(model, levers.lora, config.adapters, build.adapter_dtype(levers))

    def rests_in(name: str, param: nn.Parameter) -> torch.dtype:
        return param.dtype if ".lora_" in name else build.rests_in(levers, trains=param.requires_grad)

    with build.quiet_transformers():
        twin = skeleton()
        source: TensorSource | None = None
        if isinstance(checkpoint, DeepSpeedCheckpoint):
            source = checkpoint.name_for(twin, adapters=False)
        elif (folder := checkpoint or weights) is not None:
            source = open_weights(folder, twin, cache, progress=events.report, files=files)
        drawn = twin if levers.lora is None else adapt(skeleton())
        draws = Scratch(drawn, config.training.seed)

        def read(name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
            """Adapters are drawn from the seed, and everything where there are no weights."""
            chosen: TensorSource = draws if source is None or ".lora_" in name else source
            return chosen.read(name, shape, start, stop)

        model = skeleton()
        oddities = build.audit(model, working)
        if levers.compress == "zeropp":
            from tightfit.train.zeropp import compress_deepspeed

            compress_deepspeed(place, config.world.gpus_per_node)
        if zero3:
            assert config.deepspeed is not None
            model = build.partition(model, kernel, config.deepspeed, trust_remote_code=trusted)
        kernels_said = install_kernels(model, levers, on_gpu=place.on_gpu)
        if source is not None:
            fill_buffers(model, source)
        build.freeze(model, levers)
        stages, buffers = None, {name: buffer.dtype for name, buffer in model.named_buffers()}
        if config.stages:
            gpu = place.rank // levers.stage_ranks(place.world)
            stages = Stages(config.stages, gpu, levers.pipeline_parallel)
            cut(model, stages)
        packed: Packed | None = None
        if method == "qlora":
            if levers.streams:
                packed = Packed(model, levers, place)
            build.quantise(
                model,
                lambda name, shape: read(name, shape, 0, prod(shape)).view(shape),
                place.device,
                working,
                None if packed is None else packed.keep,
            )
        model = adapt(model)
        if not zero3:
            build.cast_meta(model, rests_in)
        if levers.mlp == "tiled":
            tile_mlps(model)
        recomputed, within, compiler, compile_said, how = 0, 0, None, None, levers.checkpointing
        if levers.streams and not how.select:  # whole layers recompute as the engine walks through them
            recomputed = count_whole(model, how)
            how = Checkpointing(layers=0)
        if levers.compile == "layers":
            obstacle: Said | None = find_obstacle(levers, place)
            if obstacle is None:
                try:
                    compile_said = keep_code(cache.parent, place, config.world.gpus_per_node)
                except OSError as error:  # there is no room for temporary files either
                    obstacle = say_why(error)
            if obstacle is None:
                compiler = Compiler(events)
                within = compiler.compile(model, how, place.device)
            else:
                compile_said = Message("train.not-compiled", why=obstacle)
        if compiler is None:
            recomputed += recompute(model, how)
        select_said = say_whole(model, levers.checkpointing)
        progress = events.progress(Message("train.reading-weights"))
        engine: Engine
        if levers.is_fsdp2:
            from tightfit.train.engines.fsdp2 import Fsdp2, shard
            from tightfit.train.engines.pipeline import Pipeline
            from tightfit.train.experts import own_experts
            from tightfit.train.mesh import make_expert_mesh, make_mesh

            mesh, expert_mesh = make_mesh(levers, place), None
            if levers.expert_parallel > 1:
                expert_mesh = make_expert_mesh(levers, place)
                own_experts(model, expert_mesh, is_rehearsal=place.rehearsal)
            if method != "qlora":  # packed weights cannot be cut before they are packed
                shard(model, levers, mesh, place, expert_mesh)
            rests_on_host = method != "qlora" and levers.offload_param != "none"
            materialise(model, torch.device("cpu") if rests_on_host else place.device)
            fill(model, read, working, place.rank, progress)
            if method == "qlora":
                shard(model, levers, mesh, place, expert_mesh)
            _move_buffers(model, place.device)
            if stages is None:
                engine = Fsdp2(model, levers, place, config.training)
            else:
                if levers.lora is None:  # or adapters alone train
                    build.freeze(drawn, levers)
                trained = {name: tuple(each.shape) for name, each in drawn.named_parameters() if each.requires_grad}
                engine = Pipeline(model, levers, place, config.training, mesh, stages, trained)
        elif levers.streams:
            from tightfit.train.engines.stream import StreamAdapters, StreamWeights
            from tightfit.train.optimizers import name_decays

            decays = name_decays(model, config.training.weight_decay) if levers.lora is None else {}
            stream = place_model(model, levers, place, decays, packed)
            fill(model, read, working, place.rank, progress)
            _move_buffers(model, place.device)
            if levers.lora is None:
                disk = config.nvme_path if levers.offload_optimizer == "nvme" else None
                engine = StreamWeights(model, levers, place, config.training, stream, disk)
            else:
                engine = StreamAdapters(model, levers, place, config.training, stream)
        else:
            materialise(model, place.device)
            fill(model, read, working, place.rank, progress)
            if levers.engine == DDP:
                from tightfit.train.engines.ddp import Ddp

                engine = Ddp(model, levers, place, config.training)
            else:
                from tightfit.train.engines.deepspeed import DeepSpeed, report_meanwhile

                with report_meanwhile(Message("train.starting-deepspeed"), events.doing):
                    assert config.deepspeed is not None
                    engine = DeepSpeed(model, config.deepspeed, levers, place, config.training.weight_decay)
    loss_said = try_kernels()[1] if levers.loss == "fused" and place.on_gpu else None
    repaired = (Message("train.dtype-repaired", oddity=odd) for odd in oddities)
    found = said, scan_said, kernels_said, loss_said, compile_said, select_said
    sentences = tuple(sentence for sentence in (*found, *repaired) if sentence)
    return Assembled(
        engine=engine,
        hf_config=hf,
        twin=twin,
        whole=drawn,
        buffers=buffers,
        recomputed=recomputed,
        within=within,
        compiler=compiler,
        said=sentences,
    )


def materialise(model: nn.Module, device: torch.device) -> None:
    """Memory for every parameter that is still on the meta device, and buffers on the device; values come later."""
    build.replace_meta(model, lambda _, param: torch.empty_like(param, device=device))
    _move_buffers(model, device)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)


Reader = Callable[[str, tuple[int, ...], int, int], Tensor]  # name and shape of a parameter, and which of its elements


def read_into(
    target: Tensor, read: Reader, name: str, shape: tuple[int, ...], start: int, columns: Columns | None = None
) -> None:
    """In pieces, so that the host never holds more than one."""
    if columns is not None:
        first, every = start // columns.width, prod(shape[1:])
        rows = target.view(target.numel() // columns.width, columns.width)
        step = max(1, PIECE_ELEMENTS // every)
        for begin in range(0, len(rows), step):
            end = min(begin + step, len(rows))
            whole = read(name, shape, (first + begin) * every, (first + end) * every).view(-1, every)
            rows[begin:end].copy_(whole[:, columns.low : columns.high])
        return
    for begin in range(0, target.numel(), PIECE_ELEMENTS):
        end = min(begin + PIECE_ELEMENTS, target.numel())
        target[begin:end].copy_(read(name, shape, start + begin, start + end))


def fill(model: nn.Module, read: Reader, dtype: torch.dtype, rank: int, progress: Callable[[int, int], None]) -> None:
    """Every parameter that still waits for its values, straight into this rank's part of it."""
    waiting = [shard for shard in outline(model, rank) if shard.parameter.dtype.is_floating_point]  # 4-bit ones have
    total, done = sum(shard.size for shard in waiting), 0
    with torch.no_grad():
        for shard in waiting:
            with shard.access(write=True) as target:
                read_into(
                    target, lambda *where: read(*where).to(dtype), shard.name, shard.shape, shard.start, shard.columns
                )
            done += shard.size
            progress(done, total)


def fill_buffers(model: nn.Module, weights: TensorSource) -> None:
    """Buffers that the checkpoint holds: a router's correction, say, is learnt, and no build can compute it."""
    kept = set(model.state_dict())
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for path, module in model.named_modules():
        for leaf, buffer in list(module._buffers.items()):
            name = f"{path}.{leaf}" if path else leaf
            if buffer is None or name not in kept:
                continue
            values = weights.read(name, tuple(buffer.shape), 0, buffer.numel()).view(buffer.shape)
            precise = buffer.is_floating_point() and any(word in name for word in wide)
            dtype = torch.float32 if precise else buffer.dtype
            module._buffers[leaf] = values.to(buffer.device, dtype)
