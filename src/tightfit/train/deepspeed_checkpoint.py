"""A DeepSpeed checkpoint of another program, read in ranges: its weights, and where ZeRO wrote them the fp32 copies and
moments under the names of their parameters.

DeepSpeed's files have no names beside the numbers. ZeRO 1 and 2 lay all parameters of a group end to end, in the order
of `param_shapes`, and give each rank an equal stretch; ZeRO 3 cuts each parameter into equal parts and lays a rank's
parts end to end. What lies where follows from the shapes, the order and the number of ranks, for the moments as for the
weights, so that another engine on another number of ranks can go on from them.

The files are pickles. They are read with torch's loader for weights, which runs nothing that a file asks for: tensors
and plain values, and of DeepSpeed's own classes stand-ins that only hold what was stored. A file that wants more is
opened only where the user trusts its maker. They are mapped and not read whole, and each rank copies what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 # the name of what torch raises; nothing is unpickled with it
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from tightfit.messages import Listing, Message, Said, message_of
from tightfit.train.engines import MASTER, LossScale, moments
from tightfit.train.safetensors_files import Stored, overlaps
from tightfit.train.sources import adapter_name, map_names, wrong_shape
from tightfit.types import ConfigError, ModelError, Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"
"""What the model's own file holds, where a parameter has no fp32 copy: it was frozen, or nothing was sharded."""

_HELD = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
_STAND_INS = [
    type("ZeroStageEnum", (int,), {"__module__": "deepspeed.runtime.zero.config"}),
    *(type(name, (), {"__module__": module}) for module, names in _HELD.items() for name in names),
]
"""For what DeepSpeed itself puts beside the tensors; nothing of DeepSpeed's is called."""


@dataclass(slots=True)
class _Parts:
    """A tensor as flat parts that lie end to end."""

    shape: tuple[int, ...]
    parts: list[Tensor]

    def read(self, start: int, stop: int) -> Tensor:
        places = overlaps((part.numel() for part in self.parts), start, stop)
        pieces = [self.parts[number][low:high].reshape(-1) for number, low, high in places]
        return torch.cat(pieces) if pieces else self.parts[0][:0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedCheckpoint:
    folder: Path
    stage: int
    world: int
    step: int  # optimizer steps of the training, skipped ones too
    optimizer_steps: int
    scale: LossScale | None
    effective_batch: int | None
    trained_elements: int | None  # None: it is not told apart from what was frozen
    kinds: frozenset[str]  # what every trained parameter has: fp32 copies and moments
    tensors: Mapping[str, Mapping[str, _Parts]] = field(repr=False)  # kind → name → values

    def missing_for(self, optimizer: Optimizer, trained_elements: int) -> Message | None:
        """Why a job with this optimizer cannot go on with the states, in words; None: it can."""
        if not self.kinds:
            return Message("train.no-named-states")
        if self.trained_elements != trained_elements:
            return Message("train.other-trained", then=self.trained_elements, now=trained_elements)
        needed = moments(optimizer)
        if needed and needed != MOMENTS:
            return Message("train.other-moments", optimizer=optimizer)
        if not self.kinds.issuperset(needed):
            return Message("train.moments-missing", moments=Listing(MOMENTS, "and"), optimizer=optimizer)
        return None

    def name_for(self, twin: Any, *, adapters: bool) -> NamedTensors:
        """Under the names that this job has for its parameters; `twin`: the model on the meta device."""
        own = {name: parts.shape for held in (WEIGHT, MASTER) for name, parts in self.tensors.get(held, {}).items()}
        trained = {adapter_name(name): (name,) for name in own if ".lora_" in name}
        if adapters and not trained:
            raise ConfigError(Message("train.states-of-whole-model", folder=self.folder))
        if adapters:
            return NamedTensors(self, trained)
        if trained:
            raise ConfigError(Message("train.states-of-adapters", folder=self.folder))
        stored = {name: Stored(self.folder, "F32", shape, 0, 0) for name, shape in own.items()}
        found = map_names(twin, stored)
        if lacking := (*found.missing, *found.needs_conversion):
            raise ConfigError(Message("train.states-lack", folder=self.folder, name=lacking[0]))
        for name, tensor in twin.state_dict(keep_vars=True).items():
            if problem := wrong_shape(name, tuple(tensor.shape), found.parts[name], stored):
                raise ConfigError(Message("train.states-of-another-model", folder=self.folder, problem=problem))
        return NamedTensors(self, found.parts)


class NamedTensors:
    """The values of a checkpoint for the parameters of a job: its weights, and what its optimizer kept."""

    def __init__(self, opened: DeepSpeedCheckpoint, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._opened, self._parts = opened, parts

    def holds(self, kind: str, name: str) -> bool:
        held = self._opened.tensors.get(kind, {})
        return name in self._parts and all(key in held for key in self._parts[name])

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """The weights: their fp32 copies where there are any."""
        return self.read_state(MASTER if self.holds(MASTER, name) else WEIGHT, name, shape, start, stop)

    def read_state(self, kind: str, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        if not self.holds(kind, name):
            raise ConfigError(Message("train.states-lack-kind", folder=self._opened.folder, kind=kind, name=name))
        held = self._opened.tensors[kind]
        ends = _Parts(shape, [part for key in self._parts[name] for part in held[key].parts])
        if sum(part.numel() for part in ends.parts) != math.prod(shape):
            said = {"folder": self._opened.folder, "kind": kind, "name": name, "shape": list(shape)}
            raise ConfigError(Message("train.states-of-another-size", **said))
        return ends.read(start, stop)

    def close(self) -> None:
        """The files are mapped for as long as their tensors are."""


def open_deepspeed(folder: Path, *, trust_pickle: bool) -> DeepSpeedCheckpoint:
    """The checkpoint whose files are in `folder`, or the sentence for why it cannot be read."""
    models, ranks = (sorted(folder.glob(f"*_{what}_states.pt"), key=_rank) for what in ("model", "optim"))
    is_parallel = any("_expert_" in path.name or path.name.startswith("layer_") for path in folder.glob("*.pt"))
    if is_parallel or any("mp_rank_00" not in path.name for path in (*models, *ranks)):
        raise ConfigError(Message("train.states-parallel", folder=folder))
    if not models:
        raise ConfigError(Message("train.no-model-states", folder=folder))
    heads = [_load(path, trust_pickle=trust_pickle) for path in models]
    tails = [_load(path, trust_pickle=trust_pickle) for path in ranks]
    try:
        return _open(folder, heads, tails)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        why = Message("train.raised", kind=type(error).__name__, why=message_of(error))
        raise ConfigError(Message("train.states-do-not-fit", folder=folder, why=why)) from None


def _rank(path: Path) -> int:
    digits = path.name.partition("pp_rank_")[2].partition("_")[0]
    return int(digits) if digits.isdigit() else 0


def _load(path: Path, *, trust_pickle: bool) -> Mapping[str, Any]:
    safe_globals = getattr(torch.serialization, "safe_globals", None)  # an older torch has none
    try:
        with nullcontext() if trust_pickle or safe_globals is None else safe_globals(_STAND_INS):
            found = torch.load(  # noqa: TID251 # safetensors is not what DeepSpeed writes; see above
                path, map_location="cpu", mmap=is_zipfile(path), weights_only=not trust_pickle
            )
    except Exception as error:  # a damaged file can end in anything
        if isinstance(error, UnpicklingError) and (asked := _ask_stranger(path)) is not None:
            raise ConfigError(Message("train.states-need-trust", path=path, asked=asked)) from None
        why = str(error).strip().partition("\n")[0]
        raise ModelError(Message("train.states-unreadable", path=path, why=why)) from None
    if not isinstance(found, Mapping):
        raise ModelError(Message("train.not-deepspeed-states", path=path))
    return found


def _ask_stranger(path: Path) -> Said | None:
    """A class that the file asks for beyond those that are read safely; None: there is none, or it is no such file."""
    known = {f"{each.__module__}.{each.__qualname__}" for each in _STAND_INS}
    try:
        listed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except ValueError:
        return None
    except AttributeError:  # an older torch, which cannot tell
        return Message("train.unnamed-classes")
    return next((name for name in listed if name not in known), None)


# --- what lies where -----------------------------------------------------------------------------


def _open(folder: Path, heads: Sequence[Mapping[str, Any]], tails: Sequence[Mapping[str, Any]]) -> DeepSpeedCheckpoint:
    head = heads[0]
    ranks = [tail["optimizer_state_dict"] for tail in tails]
    stage = int(ranks[0]["zero_stage"]) if ranks else 0
    shapes = [{_plain(name): tuple(shape) for name, shape in group.items()} for group in head.get("param_shapes") or ()]
    if not ranks and stage == 0 and any(tensor.numel() == 0 for tensor in head["module"].values()):
        raise ValueError(Message("train.no-optim-states"))
    # What is whole in the model's file, buffers too; of ZeRO 3 the frozen parameters from the parts of all ranks.
    found = {
        _plain(name): _Parts(tuple(tensor.shape), [tensor.reshape(-1)])
        for name, tensor in head["module"].items()
        if isinstance(tensor, Tensor) and (stage < 3 or name in head["buffer_names"])
    }
    if stage == 3:
        for name, shape in (head.get("frozen_param_shapes") or {}).items():
            parts = [each["frozen_param_fragments"][name].reshape(-1) for each in heads]
            found[_plain(name)] = _Parts(tuple(shape), _crop(parts, math.prod(shape)))
    for name, same in dict(head.get("shared_params") or {}).items():
        if _plain(same) in found:
            found[_plain(name)] = found[_plain(same)]
    tensors: dict[str, dict[str, _Parts]] = {WEIGHT: found}
    if ranks:
        counts = ranks[0]["partition_count"]
        world = max(counts) if isinstance(counts, list) else int(counts)
        if world != len(ranks):
            raise ValueError(Message("train.other-ranks-wrote", world=world, ranks=len(ranks)))
        # fp32 copies, and the moments that every group of every rank has.
        weights = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        vectors: dict[str, Groups] = {MASTER: [[flat.reshape(-1) for flat in rank[weights]] for rank in ranks]}
        states = [list(_states(rank, stage)) for rank in ranks]
        for kind in MOMENTS:
            vectors[kind] = [
                [flat.reshape(-1) for group in groups if isinstance(flat := group.get(kind), Tensor)]
                for groups in states
            ]
        for kind, groups in vectors.items():
            if all(len(group) == len(vectors[MASTER][0]) for group in groups):
                placed = _cut(shapes, groups) if stage == 3 else _end_to_end(shapes, groups, ranks[0])
                tensors[kind] = dict(placed)
    trained = [name for group in shapes for name in group]
    kinds = frozenset(
        kind for kind in (MASTER, *MOMENTS) if trained and all(name in tensors.get(kind, {}) for name in trained)
    )
    step, samples = int(head.get("global_steps") or 0), int(head.get("global_samples") or 0)
    # Steps that the moments have seen; some optimizers do not say.
    steps_said = (group.get("step") for rank in ranks[:1] for group in _states(rank, stage))
    seen = [int(said) for said in steps_said if said is not None]
    return DeepSpeedCheckpoint(
        folder=folder,
        stage=stage,
        world=max(1, len(ranks)),
        step=step,
        optimizer_steps=max(seen, default=step - int(head.get("skipped_steps") or 0)),
        scale=LossScale.of_deepspeed(ranks[0].get("loss_scaler")) if ranks else None,
        effective_batch=samples // step if step and samples else None,
        trained_elements=sum(math.prod(shape) for group in shapes for shape in group.values()) if shapes else None,
        kinds=kinds,
        tensors=tensors,
    )


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def _crop(parts: Sequence[Tensor], numel: int) -> list[Tensor]:
    """Without what the last ranks have as padding."""
    if sum(part.numel() for part in parts) < numel:
        raise ValueError(Message("train.numbers-missing", found=sum(part.numel() for part in parts), wanted=numel))
    kept, left = [], numel
    for part in parts:
        kept.append(part[: min(left, part.numel())])
        left -= kept[-1].numel()
    return kept


Groups = list[list[Tensor]]  # for each rank its flat vector of each group


def _states(rank: Mapping[str, Any], stage: int) -> Iterator[Mapping[str, Any]]:
    """What the optimizer keeps of each group, in their order."""
    base = rank.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):  # "elastic": the groups themselves, without padding
        yield from base
    elif isinstance(base, Mapping):
        for group in base["param_groups"]:
            for number in group["params"]:
                yield {"step": group.get("step"), **base["state"].get(number, {})}


def _end_to_end(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Groups, first: Mapping[str, Any]
) -> Iterator[tuple[str, _Parts]]:
    """ZeRO 1 and 2: a group is one vector, of which each rank has an equal stretch; the last ones may be cut short."""
    alignments = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for index, (group, paddings) in enumerate(zip(shapes, alignments, strict=True)):
        vectors = [rank[index] for rank in ranks]
        stretch, begin = max(vector.numel() for vector in vectors), 0
        if len(ranks) == 1 and vectors[0].numel() < sum(map(math.prod, group.values())):
            raise ValueError(Message("train.group-too-small"))
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            end = begin + math.prod(shape)
            places = overlaps([stretch] * -(-end // stretch), begin, end)
            yield name, _Parts(shape, [vectors[number].narrow(0, low, high - low) for number, low, high in places])
            begin = end + int(padding)


def _cut(shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Groups) -> Iterator[tuple[str, _Parts]]:
    """ZeRO 3: each rank has an equal part of each parameter, one after another."""
    ends = list(accumulate(vector.numel() for vector in ranks[0]))
    group, begin = 0, 0
    for name, shape in (pair for each in shapes for pair in each.items()):
        share = -(-math.prod(shape) // len(ranks))
        while begin >= ends[group] and share:
            group += 1
        offset = begin - (ends[group - 1] if group else 0)
        parts = [rank[group].narrow(0, offset, share) for rank in ranks]
        yield name, _Parts(shape, _crop(parts, math.prod(shape)))
        begin += share
