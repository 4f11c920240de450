"""Going on from a checkpoint: which one, whether it is whole, and its values into this run's engine.

The first rank of each node says what lies on its disk; all ranks hash a share of its bytes; the newest that holds is
taken, and every one that does not is named. Then each rank reads the ranges that it needs: nobody holds a whole model,
and the engine, its stage and the number of ranks may be others than those that saved it.

`state.json` says beside the tensors where a run stands, and so whether another job may go on from there. Of random
numbers nothing has to be kept: each step draws them from the seed, its own number and the rank. Nor of the data: the
step's number says which samples come next, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightfit.messages import Message, Said
from tightfit.owned import NotOurs
from tightfit.runs import checkpoints
from tightfit.runs.checkpoints import OPTIMIZER, SCHEMA, Span, Torn
from tightfit.runs.folder import AUTO, NONE, set_aside
from tightfit.train.assemble import Reader, TensorSource, read_into
from tightfit.train.checkpoint import OWN, own_shape, state_name
from tightfit.train.config import WorkerConfig
from tightfit.train.data.samples import Samples
from tightfit.train.deepspeed_checkpoint import DeepSpeedCheckpoint, NamedTensors
from tightfit.train.engines import MASTER, Counters, Engine, LossScale
from tightfit.train.events import Events
from tightfit.train.nodes import NodeDisks
from tightfit.train.parts import PartFiles, find_offers, judge
from tightfit.train.place import Place, meet
from tightfit.train.safetensors_files import Files, Stored, read_header
from tightfit.train.shards import outline
from tightfit.types import ConfigError

SILENT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""Fields of a Hugging Face config that say nothing about what is trained."""
SAVED_AS = ("rescale_prenorm_residual",)
"""Fields that a saved model has otherwise than the one that is made from scratch."""
JOB_LEVERS = ("trains", "frozen_layers", "precision", "optimizer", "sequence")
PLAN_LEVERS = ("precision", "method", "micro_batch", "accumulation", "offload_optimizer", "offload_param", "compress")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    folder: Path
    step: int
    state: Mapping[str, Any]
    files: PartFiles | None = None  # None: it lies in that folder whole, where every rank sees it
    deepspeed: DeepSpeedCheckpoint | None = None  # it is one of another program, under its own names
    weights_alone: bool = False  # the training begins with its weights, and the optimizer anew


def choose(run: Path, wanted: str, place: Place, nodes: NodeDisks, events: Events) -> FoundCheckpoint | None:
    """The checkpoint to go on from; None: there is none, or none is wanted. The same on every rank."""
    clear(run, place, nodes)
    if wanted == NONE:
        return None
    # As the first rank of a node sees them: on a shared disk others may see them a moment later.
    named = run if wanted == AUTO else Path(wanted)
    step = None if wanted == AUTO else checkpoints.step_of(named)
    found = checkpoints.newest_first(named)
    if step is not None and checkpoints.is_part(named):
        # With those beside it, and on other nodes, whose folders may be called otherwise.
        runs = sorted({named.parent.parent, run} if nodes.are_apart else {named.parent.parent})
        every = [each for one in runs for each in checkpoints.newest_first(one)]
        found = [each for each in every if checkpoints.is_part(each) and checkpoints.step_of(each) == step]
    elif step is not None:
        found = [named] if named.is_dir() else []
    problems = []
    for offer in find_offers(place, nodes, found):
        folder = offer.folder
        judged = judge(offer, place, nodes, partial(_verify, events))
        if judged.problem is None:
            files = None
            if nodes.are_apart or judged.manifests[0].part is not None:
                own = [lying.folder for lying in judged.lying if lying.node == nodes.here]
                folder = own[0] if own else checkpoints.folder_of(run, offer.step)
                files = PartFiles(folder, judged, place, nodes)
            return FoundCheckpoint(folder=folder, step=offer.step, state=judged.state, files=files)
        problem = judged.problem
        if judged.is_unknown:  # to go back behind it would lose what it holds, for the run comes to its step again
            raise ConfigError(Message("train.checkpoint-unseen", folder=folder, why=problem))
        problems.append((folder, problem))
        events.write("passed_over", folder=str(folder), text=problem)
    if problems:
        (folder, problem), older = problems[0], len(problems) - 1
        one: Said = Message("train.nor-the-older") if older else ""
        others = Message("train.nor-older", older=older) if older > 1 else one
        raise ConfigError(Message("train.checkpoint-torn", folder=folder, problem=problem, others=others))
    if wanted != AUTO:
        raise ConfigError(Message("train.no-checkpoint", wanted=wanted))
    return None


def make_way(run: Path, found: FoundCheckpoint | None, wanted: str, nodes: NodeDisks) -> None:
    """Going back behind newer ones, or beginning anew: a later start would take those, which are of another course,
    and rotation would keep them instead of this run's. The desk has done the same where there is one."""
    if wanted == AUTO or not nodes.leads:
        return
    own = found is not None and found.folder.resolve().parent == (run / checkpoints.CHECKPOINTS).resolve()
    behind = found.step if found is not None and own else 0
    set_aside(run, [each for each in checkpoints.newest_first(run) if (checkpoints.step_of(each) or 0) > behind])


def clear(run: Path, place: Place, nodes: NodeDisks) -> None:
    """What killed runs left half-written. Whoever is here holds the run's lock."""
    if nodes.leads and not place.rehearsal:
        for orphan in checkpoints.orphans(run):
            with suppress(OSError, NotOurs):  # a disk that may only be read, or somebody's file: the next save says so
                checkpoints.remove_orphan(orphan)
    meet(place)


def _verify(events: Events, folder: Path, share: Sequence[tuple[str, Span]]) -> None:
    """Hash these bytes again, and say how far that has come."""
    size, done = sum(span.stop - span.start for _, span in share), 0
    progress = events.progress(Message("train.verifying"))

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, size)

    checkpoints.verify(folder, share, add)


def describe_state(
    config: WorkerConfig, job: Mapping[str, Any], counters: Counters, step: int, versions: Mapping[str, str]
) -> dict[str, Any]:
    """`state.json` after `step` steps."""
    levers = config.levers
    return {
        "schema": SCHEMA,
        "step": step,
        "samples": step * config.effective_batch,
        "epoch": round(step * config.effective_batch / max(1, job["data"]["samples"]), 6),
        "random": {"seed": config.training.seed, "drawn": "from seed, step and rank, anew at every step"},
        "optimizer": {"kind": levers.optimizer, "steps": counters.optimizer_steps},
        "loss_scale": None if counters.scale is None else asdict(counters.scale),
        "schedule": asdict(config.training),
        "job": dict(job),
        "plan": {
            "engine": levers.engine,
            "world": config.world.ranks,
            **{name: getattr(levers, name) for name in PLAN_LEVERS},
        },
        "versions": dict(versions),
    }


def job_of(config: WorkerConfig, hf_config: Any, samples: Samples) -> dict[str, Any]:
    """What a training is, apart from how it is computed."""
    levers, adapters = config.levers, None
    if levers.lora is not None and config.adapters is not None:
        targets = "all" if levers.lora.targets is None else sorted(levers.lora.targets)
        adapters = {"rank": levers.lora.rank, "targets": targets, **asdict(config.adapters)}
    return {
        "model": _plain(hf_config.to_dict()),
        "base": (config.model.weights or config.model.name) if adapters else None,
        "method": levers.method,
        "lora": adapters,
        **{name: getattr(levers, name) for name in JOB_LEVERS},
        "effective_batch": config.effective_batch,
        "seed": config.training.seed,
        "data": {
            "path": str(config.data.get("path")),
            "samples": len(samples),
            "fingerprint": samples.fingerprint,
            "held_back": config.evaluation.split,
        },
    }


def _plain(tree: Any) -> Any:
    """As JSON has it."""
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items() if str(key) not in (*SILENT, *SAVED_AS)}
    if isinstance(tree, (list, tuple)):
        return [_plain(value) for value in tree]
    return tree if isinstance(tree, (str, int, float, bool)) or tree is None else str(tree)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Message]:
    """What of the job is not what it was, a sentence each."""
    found = {path: (old, new) for path, old, new in _compare(then, now)}
    if "data.fingerprint" not in found:
        found.pop("data.path", None)  # the same samples from another place
    return [
        Message("train.other-samples")
        if path == "data.fingerprint"
        else Message("train.was-and-is", name=path, old=old, new=new)
        for path, (old, new) in found.items()
    ]


def _compare(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields that both know and that differ: a newer transformers may know more."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in then:
            if key in now:
                yield from _compare(then[key], now[key], f"{path}.{key}" if path else key)
    elif then != now:
        yield path, then, now


def schedule_differences(then: Mapping[str, Any], config: WorkerConfig) -> list[Message]:
    """What of the optimizer's numbers is not what it was: a longer run, say, which is the user's to choose."""
    changed = _compare(then, asdict(config.training))
    return [Message("train.was-and-is", name=path, old=old, new=new) for path, old, new in changed if path != "seed"]


class CheckpointFiles:
    """Files of a checkpoint, read in ranges: adapters under PEFT's names, and the optimizer's as `exp_avg/NAME`."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder, self._files = folder, files or Files()
        self._stored: dict[str, Stored] = {}
        adapters, states = (folder, "adapter_model.safetensors"), (folder / OPTIMIZER, "*.safetensors")
        for path in (*self._files.find(*adapters), *self._files.find(*states)):
            self._stored |= read_header(path, self._files)[0]

    def holds(self, kind: str, name: str) -> bool:
        return f"{kind}/{name}" in self._stored

    def of_ranks(self) -> Mapping[str, tuple[int, ...]]:
        """What each rank had for itself, and its shape."""
        return {name.removeprefix(f"{OWN}/"): each.shape for name, each in self._stored.items() if name.startswith(OWN)}

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        if not self._is_there(name, shape):
            raise ConfigError(Message("train.checkpoint-lacks-adapter", name=name, shape=list(shape)))
        return self._files.read(self._stored[name], start, stop)

    def read_state(self, kind: str, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        if not self._is_there(f"{kind}/{name}", shape):
            said = {"folder": self._folder, "kind": kind, "name": name, "shape": list(shape)}
            raise ConfigError(Message("train.checkpoint-lacks-kind", **said))
        return self._files.read(self._stored[f"{kind}/{name}"], start, stop)

    def _is_there(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self._stored and self._stored[name].shape == shape

    def close(self) -> None:
        self._files.close()


StoredStates = CheckpointFiles | NamedTensors  # fp32 copies and moments, by the name of the parameter


def load(
    found: FoundCheckpoint, engine: Engine, weights: TensorSource, states: StoredStates, place: Place, *, filled: bool
) -> Message | None:
    """Weights that train, their fp32 copies, moments and counters, as they were. `filled`: the model was filled from
    the checkpoint's weights. A sentence about what could not be taken over."""

    def moment(kind: str) -> Reader:
        return lambda path, *where: states.read_state(kind, state_name(path), *where)

    def weight(path: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        return weights.read(state_name(path), shape, start, stop)

    def master(path: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        if states.holds(MASTER, state_name(path)):
            return states.read_state(MASTER, state_name(path), shape, start, stop)
        return weight(path, shape, start, stop)

    with torch.no_grad():
        for shard in outline(engine.model, place.rank):
            wide = shard.parameter.dtype == torch.float32
            done = filled and not (wide and states.holds(MASTER, state_name(shard.path)))
            if shard.parameter.requires_grad and not done:
                with shard.access(write=True) as target:
                    where = shard.path, shard.shape, shard.start, shard.columns
                    read_into(target, master if wide else weight, *where)
        for state in engine.states(write=True):
            if found.weights_alone and state.kind != MASTER:
                continue
            read = master if state.kind == MASTER else moment(state.kind)
            read_into(state.tensor, read, state.path, state.shape, state.start, state.columns)
        lost = _load_own(engine.own_states(), states, place)
    states.close()
    try:
        steps, scale = int(found.state["optimizer"]["steps"]), found.state["loss_scale"]
        counters = Counters(optimizer_steps=steps, scale=None if scale is None else LossScale(**scale))
    except (KeyError, TypeError, ValueError):
        raise Torn(Message("train.state-lacks")) from None
    engine.go_on(counters, found.step)
    return lost


def _load_own(own: Mapping[str, Tensor], states: StoredStates, place: Place) -> Message | None:
    """What compressed messages had left out, where the ranks are the same; or that it is lost. Single numbers are the
    same on all ranks, and stay."""
    stored = states.of_ranks() if isinstance(states, CheckpointFiles) else {}
    are_same = stored == {name: own_shape(tensor, place.world) for name, tensor in own.items()}
    for name, tensor in own.items():
        if are_same or (tensor.numel() == 1 and name in stored):
            start = place.rank * tensor.numel() if are_same else 0
            read_into(tensor, partial(states.read_state, OWN), name, stored[name], start)
    return None if are_same else Message("train.left-out-lost")
