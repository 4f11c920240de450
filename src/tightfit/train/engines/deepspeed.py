"""DeepSpeed's engine, stages 0 to 3, with the file that the plan wrote.

Three habits of it are met here. Stage 0 takes a step while it starts: the optimizer begins at learning rate zero, so
nothing moves, and its counters are set back. `backward` would divide by the accumulation and the reduction divides by
the ranks: the loss arrives as a share of the window's mean already, so the first is switched off and the second made
good. ZeRO-3 wants the model built under its own context, the other stages take it whole.

Where fp32 copies and moments are differs by stage. Stages 1 and 2 flatten all parameters into one vector and give each
rank a stretch of it; a parameter knows the fragment of itself that lies there (`_hp_mapping`). Stage 3 cuts each
parameter and flattens the cuts in sub groups (`grad_position`). Stage 0 has everything on every rank: in 16 bits a flat
fp32 vector where its own fused Adam runs (`fp32_groups_flat`), or an fp32 copy of each parameter (`fp32_groups`); in
fp32 nothing of its own, for the optimizer works on the parameters.

The moments of a flat vector come with the optimizer's first step. Where a checkpoint is loaded before it, they are
made here as that step would have made them.
"""

from __future__ import annotations

import copy
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.mamba.install import whole_mixers
from tightfit.messages import Message
from tightfit.runs.build_lock import LOCK
from tightfit.train import optimizers
from tightfit.train.engines import MASTER, Counters, Engine, Launched, LossScale, ScaleExhausted, Shapes, State, moments
from tightfit.train.nvme import MOMENTS, is_on_nvme, nvme_states
from tightfit.train.place import Place
from tightfit.train.tiles import mlps_of
from tightfit.types import ConfigError, Levers

NVME_BUFFERS = 5  # DeepSpeed's own number, where a file says none
TWO = Message("train.minutes", minutes=2)
ONE_TO_TWO = Message("train.minutes-to", least=1, most=2)
USUALLY = {"async_io": TWO} | dict.fromkeys(("cpu_adam", "fused_adam", "quantizer"), ONE_TO_TWO)
"""How long a part is compiled, on two free cores, by its folder."""
INFERENCE_ALONE = "deepspeed_shm_comm"
LOOK_S = 1.0


class DeepSpeed(Engine):
    def __init__(
        self, model: Any, config: Mapping[str, Any], levers: Levers, place: Place, weight_decay: float
    ) -> None:
        import deepspeed

        super().__init__(model, levers, place)
        stage = levers.stage or 0
        options: dict[str, Any] = {"model": model, "config": copy.deepcopy(dict(config))}
        groups, kind = optimizers.groups(model, weight_decay), levers.optimizer
        usual: dict[str, Any] = {"lr": 0.0, "betas": optimizers.BETAS, "eps": optimizers.EPS}
        if "optimizer" in config:
            options["model_parameters"] = groups
            options["config"]["optimizer"]["params"]["lr"] = 0.0
        elif stage and "8bit" in kind:
            raise ConfigError(Message("engine.states-of-no-parameter", engine=levers.engine, optimizer=kind))
        elif kind == "adamw" and levers.offload_optimizer != "none":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            options["optimizer"] = DeepSpeedCPUAdam(groups, **usual, adamw_mode=True)
        elif kind == "adamw" and stage == 0 and place.on_gpu and shutil.which("nvcc"):
            from deepspeed.ops.adam import FusedAdam  # flat states, as they are priced; it has to be compiled

            options["optimizer"] = FusedAdam(groups, **usual)
        else:
            options["optimizer"] = optimizers.make_optimizer(kind, groups, fused=place.on_gpu)
        buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        if stage == 3 and levers.scan == "tightfit":
            gather_mixers_whole(model, config)
        if stage == 3 and levers.mlp == "tiled":
            deepspeed.utils.set_z3_leaf_modules(model, list({type(mlp) for mlp in mlps_of(model)}))
        self._engine = self._runs = deepspeed.initialize(**options)[0]
        # DeepSpeed rounds buffers to 16 bits with the weights; rotary frequencies do not survive that.
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(place.device)
        self._wrapper = self._engine.optimizer
        self._basic = self._engine.basic_optimizer
        self._scaler = copy.deepcopy(getattr(getattr(self._wrapper, "loss_scaler", None), "__dict__", {}))
        look_at_once(self._wrapper)
        self._drop_second_copies()
        if stage == 0:
            optimizers.forget(self._basic)
            # Or a single rank copies its gradients into a buffer, sums them up with nobody's, and copies them back.
            self._engine.enable_backward_allreduce = place.world > 1 or levers.precision == "fp32"

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if (self._levers.stage or 0) == 0:
            # DeepSpeed (0.19.8) divides the gradient of what its forward pass returned by the accumulation, unless a
            # hook of its `backward` on the same tensor has been called before: which comes later, and so in vain.
            loss = loss.clone()
        with self._inside():
            self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # which only counts the micro batches

    def step(self, learning_rate: float) -> Launched:
        optimizers.set_rate(self._basic, learning_rate)
        before = self._engine.skipped_steps
        try:
            self._engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise ScaleExhausted(Message("engine.smallest-scale", advice=ScaleExhausted.advice)) from None
        norm = self._engine.get_global_grad_norm()
        scale = float(self._engine.optimizer.loss_scale) if self._levers.precision == "fp16" else None
        skipped = self._engine.skipped_steps > before
        return Launched(grad_norm=norm, skipped=skipped, loss_scale=scale)

    def forget(self) -> None:
        if self._levers.offload_optimizer == "nvme":
            for _, states in nvme_states(self._wrapper, write=True):
                for name in MOMENTS & states.keys():
                    states[name].zero_()
        optimizers.forget(self._basic)
        scaler = getattr(self._wrapper, "loss_scaler", None)
        if scaler is not None:
            scaler.__dict__.update(copy.deepcopy(self._scaler))
        for counter in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
            setattr(self._engine, counter, 0)

    def states(self, *, write: bool) -> Iterator[State]:
        wrapper, basic, shards = self._wrapper, self._basic, self._trainable()
        if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # stage 3
            flats = wrapper.fp32_partitioned_groups_flat
            if getattr(wrapper, "swap_optimizer", False):
                groups: Iterable[tuple[int, dict[str, Tensor]]] = nvme_states(wrapper, write)
            else:
                optimizers.make_states(basic, flats)
                groups = ((index, _elementwise(flat, basic)) for index, flat in enumerate(flats))
            where = [wrapper.grad_position[wrapper.get_param_id(shard.parameter)] for shard in shards]
            for index, held in groups:
                for shard, (group, offset, _) in zip(shards, where, strict=True):
                    if group == index:
                        for kind, flat in held.items():  # the last rank's part is padded: `size` leaves that out
                            part = flat.narrow(0, offset, shard.size)
                            yield State(kind, shard.path, shard.shape, shard.start, part, alike=False)
        elif any(hasattr(shard.parameter, "_hp_mapping") for shard in shards):  # stages 1 and 2
            flats = getattr(wrapper, "single_partition_of_fp32_groups", None) or wrapper.fp32_groups_flat_partition
            optimizers.make_states(basic, flats)
            for shard in shards:
                fragment = shard.parameter._hp_mapping  # type: ignore[attr-defined]
                if fragment is None:  # all of it lies with other ranks
                    continue
                flat, here = flats[fragment.param_group_index], fragment.hp_fragment_address
                for kind, tensor in _elementwise(flat, basic).items():
                    part = tensor.narrow(0, here.start, here.numel)
                    yield State(kind, shard.path, shard.shape, fragment.lp_fragment_address.start, part, alike=False)
        elif hasattr(wrapper, "fp32_groups_flat"):
            optimizers.make_states(basic)
            of_param = {id(shard.parameter): shard for shard in shards}
            for params, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
                held, begin = _elementwise(flat, basic), 0
                for param in params:
                    shard = of_param[id(param)]
                    for kind, tensor in held.items():
                        part = tensor.narrow(0, begin, param.numel())
                        yield State(kind, shard.path, shard.shape, 0, part, alike=True)
                    begin += param.numel()
        else:
            optimizers.make_states(basic)
            # The fp32 copy of each parameter, by the parameter's id; empty: the optimizer works on the parameters.
            pairs = zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True)
            copies = {id(param): each for params, made in pairs for param, each in zip(params, made, strict=True)}
            yield from self._states_per_parameter(basic.state, copies, write=write)

    def shapes(self) -> Shapes:
        shards = self._trainable()
        is_flat = any(hasattr(self._wrapper, name) for name in ("grad_position", "fp32_groups_flat"))
        if is_flat or any(hasattr(shard.parameter, "_hp_mapping") for shard in shards):
            whole = {shard.path: shard.shape for shard in shards}
            return dict.fromkeys((MASTER, *moments(self._levers.optimizer)), whole)
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for state in self.states(write=False):  # every rank has them whole
            found.setdefault(state.kind, {})[state.path] = state.shape
        return found

    def counters(self) -> Counters:
        scale = LossScale.of_deepspeed(self._wrapper.loss_scaler) if self._levers.precision == "fp16" else None
        return Counters(optimizer_steps=optimizers.count_steps(self._basic), scale=scale)

    def go_on(self, counters: Counters, step: int) -> None:
        optimizers.set_steps(self._basic, counters.optimizer_steps)
        if counters.scale is not None and self._levers.precision == "fp16":
            scale, scaler = counters.scale, self._wrapper.loss_scaler
            scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = scale.value, scale.good_steps, -1
            scaler.cur_hysteresis = scaler.delayed_shift if scale.hysteresis is None else scale.hysteresis
        self._engine.global_steps = step
        self._engine.skipped_steps = max(0, step - counters.optimizer_steps)
        self._engine.micro_steps = step * self._levers.accumulation
        self._engine.global_samples = step * self._engine.train_batch_size()
        # Stage 3 keeps small parameters whole on every rank; now that their parts have changed they are put together.
        if kept := getattr(self._wrapper, "persistent_parameters", None):
            kept[0].partition(kept)
            kept[0].all_gather(kept)

        self._drop_second_copies()

    def _drop_second_copies(self) -> None:
        """Those of hpZ that were made before the weights had their values; DeepSpeed itself drops what it updates. The
        next pass makes them again."""
        for param in self.model.parameters():
            if getattr(param, "ds_secondary_tensor", None) is not None:
                param.ds_secondary_tensor = None

    def _weigh_optimizer(self) -> tuple[Iterable[Tensor], int, str, float]:
        # The fp32 copies that this rank's optimizer works on, or what it works on instead.
        vectors = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat")
        worked_on = next(filter(None, (getattr(self._wrapper, name, None) for name in vectors)), None)
        if worked_on is None:
            worked_on = [param for group in self._basic.param_groups for param in group["params"]]
        masters = [each for each in worked_on if isinstance(each, Tensor)]
        elements, places = [tensor.numel() for tensor in masters], [tensor.device.type for tensor in masters]
        if self._levers.offload_optimizer == "nvme":  # they are in files, and the tensors empty
            in_file = self._wrapper._swappable_optimizer_subgroup
            elements = [int(numel) for numel in self._wrapper.fp16_partitioned_groups_flat_numel]
            places = ["nvme" if in_file(number) else place for number, place in enumerate(places)]
        fair = sum(shard.numel for shard in self._trainable()) / self._place.world
        return masters, sum(elements), ",".join(sorted(set(places))), fair


def _elementwise(flat: Tensor, basic: Any) -> dict[str, Tensor]:
    """A flat vector of fp32 copies with its moments."""
    kept = {kind: held for kind, held in basic.state[flat].items() if isinstance(held, Tensor)}
    return {MASTER: flat.detach()} | {kind: held.detach() for kind, held in kept.items() if held.shape == flat.shape}


def look_at_once(wrapper: Any) -> None:
    """DeepSpeed looks for what is not finite gradient by gradient, with ten kernels each, and without ZeRO it asks the
    device for every answer: as many waits as parameters, at the end of each step, when the device has nothing else to
    do. Here it gets the same answer of all gradients together."""
    if (checker := getattr(wrapper, "overflow_checker", None)) is not None:
        checker.has_overflow_serial = lambda params: bool(any_spoilt(param.grad for param in params))
    if hasattr(wrapper, "has_overflow_partitioned_grads_serial"):
        wrapper.has_overflow_partitioned_grads_serial = lambda: any_spoilt(
            grad for number, _ in enumerate(wrapper.bit16_groups) for grad in wrapper.averaged_gradients[number]
        )


def any_spoilt(grads: Iterable[Tensor | None]) -> Tensor:
    """Whether an element is not finite, as one number on the device."""
    held = [grad.detach() for grad in grads if grad is not None and grad.numel()]
    if not held:
        return torch.zeros(1, dtype=torch.bool)
    return torch.stack(torch._foreach_norm(held, float("inf"))).isfinite().all().logical_not().view(1)


def gather_mixers_whole(model: nn.Module, config: Mapping[str, Any]) -> None:
    """ZeRO-3's hooks on the inside of a Mamba mixer would keep it from being computed as one function. Of a leaf the
    whole is gathered at once, and its gradients are reduced together, when that of its input is there: the norm below
    each mixer trains with it, so there always is one."""
    from deepspeed.utils import set_z3_leaf_modules

    classes = whole_mixers(model)
    if not classes:
        return
    # From NVMe each parameter comes through a buffer of its own, and Mamba's head holds one from start to end.
    offload = config["zero_optimization"].get("offload_param") or {}
    mixers = [module for module in model.modules() if type(module) in classes]
    if max(sum(map(is_on_nvme, mixer.parameters())) for mixer in mixers) < offload.get("buffer_count", NVME_BUFFERS):
        set_z3_leaf_modules(model, classes)


def join(place: Place) -> None:
    """Tell DeepSpeed of the group that is there already.

    On CPUs it would compile, for a minute, sums through shared memory that none but its inference asks for.
    """
    import deepspeed

    # It logs every choice that it makes; what matters of them is proved and said by us.
    deepspeed.utils.logger.setLevel(logging.ERROR)
    backend = "fake" if place.rehearsal else None
    forgive_lost_locks()
    deepspeed.ops.__compatible_ops__[INFERENCE_ALONE] = False
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)


def forgive_lost_locks() -> None:
    """A rank that has built or loaded an extension removes its lock. If somebody took that for a dead process's and
    removed it before, there is nothing to remove, and nothing wrong with the extension."""
    from torch.utils.file_baton import FileBaton

    release: Any = FileBaton.release
    if hasattr(release, "__wrapped__"):
        return

    @wraps(release)
    def release_if_there(baton: Any) -> None:
        with suppress(FileNotFoundError):
            release(baton)

    setattr(FileBaton, "release", release_if_there)  # noqa: B010 - mypy takes no other function for a method


def extensions_folder() -> Path:
    """The folder with a folder for each part that is compiled."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("cpu_adam", False)).parent


def find_compiling(folder: Path) -> tuple[float, str] | None:
    """Since when and which part is compiled, by whichever process, the longest; one that is only looked up is there."""
    found = []
    for lock in folder.glob(f"*/{LOCK}"):
        part = lock.parent
        with suppress(OSError):  # it was done just now
            if not (part / f"{part.name}.so").exists():
                found.append((lock.stat().st_mtime, part.name))
    return min(found, default=None)


@contextmanager
def report_meanwhile(what: Message, tell: Callable[[Message], None]) -> Iterator[None]:
    """Say what is done in the block, and while DeepSpeed compiles for it, which part and since when. Each is said once:
    nobody may take this for a sign of life of a process that waits for a lock without end."""
    folder, done = extensions_folder(), threading.Event()

    def look() -> None:
        said = None
        while not done.wait(LOOK_S):
            now = find_compiling(folder)
            if now != said and now is not None:
                at, usually = time.strftime("%H:%M", time.localtime(now[0])), Message("train.a-few-min")
                tell(Message("train.compiling", part=now[1], at=at, usually=USUALLY.get(now[1], usually)))
            elif now != said:
                tell(what)
            said = now

    tell(what)
    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()
