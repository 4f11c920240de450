"""The environment variables of a run: which are set, which are left alone, and why.

Guides against `out of memory` hand on lists of variables, and some of them do harm. This is the one table:
`launch.sh` and the SLURM file export what has a value, and PLAN.md prints all of it, so that a reader who
misses a variable finds the reason. Values are shell text: some are only known on the machine that runs.
"""

from __future__ import annotations

from tightfit.formats.dialect import Variable, launchers
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way
from tightfit.messages import Message
from tightfit.planner.plan import Plan
from tightfit.planner.trainers import STARTS
from tightfit.types import ConfigError, Vendor

HIP = ("amd", "hygon")  # the vendors whose cards torch reaches through HIP


def launcher_of(plan: Plan, target: Target) -> str:
    """What starts the ranks, where the user did not say."""
    if target.launcher is not None:
        return target.launcher
    if target.cluster == "kubernetes":  # DeepSpeed's launcher would go from pod to pod by ssh
        return "torchrun"
    if plan.job.trainer != "tightfit":
        return STARTS[plan.job.trainer]
    way = require_way(plan)
    # DeepSpeed's launcher counts sockets where there is no GPU, and refuses more ranks than that.
    plain = not way.levers.uses_deepspeed or way.hardware.gpu.vendor == "cpu"
    return "torchrun" if plain else "deepspeed"


def gpu_ids_of(plan: Plan, target: Target) -> tuple[int, ...]:
    """The GPUs of a node that are used, by number."""
    wanted = require_way(plan).hardware.gpus_per_node
    if target.gpu_ids is None:
        return tuple(range(wanted))
    ids = target.gpu_ids
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
        raise ConfigError(Message("launch.gpu-ids-differ", ids=",".join(map(str, ids))))
    if len(ids) < wanted:
        raise ConfigError(Message("launch.too-few-gpu-ids", count=len(ids), wanted=wanted))
    return ids[:wanted]


def environment(plan: Plan, target: Target) -> tuple[Variable, ...]:
    """Every variable that is set or that a guide would have set, with the reason."""
    way, launcher = require_way(plan), launcher_of(plan, target)
    hardware = way.hardware
    return (
        *allocator(hardware.gpu.vendor),
        *_visibility(plan, target, launcher),
        *host(hardware.gpu.vendor, way.levers.steps_on_host, hardware.gpus_per_node, target.gpus_of_node),
        *launchers()[launcher].variables(plan, target),
        *(Variable(name=name, value=None, reason=reason) for name, reason in _LEFT_OUT.items()),
    )


def allocator(vendor: Vendor) -> tuple[Variable, ...]:
    """How torch's allocator is set up on this kind of card."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if vendor == "cpu":
        return (Variable(name=name, value=None, reason=Message("launch.no-gpu")),)
    if vendor in HIP:
        reason = Message("launch.expandable-dtk" if vendor == "hygon" else "launch.expandable-amd")
        return (Variable(name=name, value=None, reason=reason),)
    reason = Message("launch.expandable-unknown" if vendor == "unknown" else "launch.expandable")
    return (Variable(name=name, value="expandable_segments:True", reason=reason),)


def _visibility(plan: Plan, target: Target, launcher: str) -> tuple[Variable, ...]:
    """Exactly one variable chooses the GPUs, and only where the launcher does not do it."""
    vendor = require_way(plan).hardware.gpu.vendor
    if vendor == "cpu":
        return ()
    own, other = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if vendor in HIP else ("CUDA_VISIBLE_DEVICES", "")
    if target.gpu_ids is None:
        return (Variable(name=own, value=None, reason=Message("launch.yours-respected")),)
    ids = ",".join(map(str, gpu_ids_of(plan, target)))
    rows = []
    if vendor not in HIP:
        rows.append(Variable(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason=Message("launch.by-bus")))
    if launcher in ("deepspeed", "accelerate"):
        flag = "--include" if launcher == "deepspeed" else "--gpu_ids"
        reason = Message("launch.launcher-chooses", flag=flag)
        rows.append(Variable(name=own, value=None, reason=reason, unset=bool(other)))
        return tuple(rows)
    rows.append(Variable(name=own, value=ids, reason=Message("launch.asked-for")))
    if other:
        reason = Message("launch.both-obeyed", own=own)
        rows.append(Variable(name=other, value=None, reason=reason, unset=True))
    return tuple(rows)


def host(vendor: Vendor, steps_on_host: bool, ranks: int, gpus_of_node: int | None = None) -> tuple[Variable, ...]:
    """What the ranks of a node share out among them; `ranks` of them. `gpus_of_node`: the GPUs that they chose theirs
    from, since other runs may have the rest, and as many cores."""
    tokenizers = Variable(name="TOKENIZERS_PARALLELISM", value="false", reason=Message("launch.tokenizers"))
    if not steps_on_host and vendor != "cpu":
        return tokenizers, Variable(name="OMP_NUM_THREADS", value=None, reason=Message("launch.nothing-on-host"))
    # nproc obeys OMP_NUM_THREADS itself; rounding up keeps one thread for each rank of a small machine.
    cores = "$(env -u OMP_NUM_THREADS nproc)"
    sharers = max(ranks, gpus_of_node or 0)
    value = cores if sharers == 1 else f"$(( ({cores} + {sharers - 1}) / {sharers} ))"
    reason = Message("launch.optimizer-threads" if steps_on_host else "launch.training-threads")
    if sharers > ranks:
        reason = Message("launch.with-other-runs", reason=reason, gpus=sharers)
    return tokenizers, Variable(name="OMP_NUM_THREADS", value=value, reason=reason)


_LEFT_OUT = {
    "CUDA_LAUNCH_BLOCKING": Message("launch.launch-blocking"),
    "TORCH_USE_CUDA_DSA": Message("launch.use-dsa"),
    "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions": Message("launch.roundup"),
    "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb": Message("launch.max-split"),
    "NCCL_P2P_DISABLE": Message("launch.p2p"),
    "NCCL_IB_DISABLE": Message("launch.ib"),
}
"""What guides set, and why it is not set here."""


def obeys_visible(plan: Plan, target: Target, launcher: str) -> bool:
    """Whether the user's own choice of visible GPUs decides where the ranks run."""
    hardware = require_way(plan).hardware
    by_ssh = launcher == "deepspeed" and hardware.nodes > 1
    return target.gpu_ids is None and hardware.gpu.vendor != "cpu" and not by_ssh
