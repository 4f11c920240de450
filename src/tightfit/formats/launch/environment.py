"""The environment variables of a run: which are set, which are left alone, and why.

Guides against `out of memory` hand on lists of variables, and some of them do harm. This is the one table:
`launch.sh` and the SLURM file export what has a value, and PLAN.md prints all of it, so that a reader who
misses a variable finds the reason. Values are shell text: some are only known on the machine that runs.
"""

from __future__ import annotations

from tightfit.formats.dialect import Variable
from tightfit.formats.registry import launchers
from tightfit.formats.target import Target
from tightfit.formats.worker.write import chosen_way
from tightfit.planner.plan import Plan
from tightfit.planner.trainers import STARTS
from tightfit.types import ConfigError, Vendor

HIP = ("amd", "hygon")
"""The vendors whose cards torch reaches through HIP."""


def launcher_of(plan: Plan, target: Target) -> str:
    """What starts the ranks, where the user did not say."""
    if target.launcher is not None:
        return target.launcher
    if plan.job.trainer != "tightfit":
        return STARTS[plan.job.trainer]
    way = chosen_way(plan)
    # DeepSpeed's launcher counts sockets where there is no GPU, and refuses more ranks than that.
    plain = way.levers.is_fsdp2 or way.hardware.gpu.vendor == "cpu"
    return "torchrun" if plain else "deepspeed"


def gpu_ids_of(plan: Plan, target: Target) -> tuple[int, ...]:
    """The GPUs of a node that are used, by number."""
    wanted = chosen_way(plan).hardware.gpus_per_node
    if target.gpu_ids is None:
        return tuple(range(wanted))
    ids = target.gpu_ids
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
        raise ConfigError(f"gpu_ids {','.join(map(str, ids))} must be different numbers from 0 up")
    if len(ids) < wanted:
        raise ConfigError(f"gpu_ids names {len(ids)} GPUs and the plan uses {wanted} of each node: name {wanted}")
    return ids[:wanted]


def environment(plan: Plan, target: Target) -> tuple[Variable, ...]:
    """Every variable that is set or that a guide would have set, with the reason."""
    way, launcher = chosen_way(plan), launcher_of(plan, target)
    hardware = way.hardware
    return (
        *allocator(hardware.gpu.vendor),
        *_visibility(plan, target, launcher),
        *host(hardware.gpu.vendor, way.levers.offload_optimizer, hardware.gpus_per_node, target.gpus_of_node),
        *launchers()[launcher].variables(plan, target),
        *_left_out(),
    )


def allocator(vendor: Vendor) -> tuple[Variable, ...]:
    """How torch's allocator is set up on this kind of card."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if vendor == "cpu":
        return (Variable(name=name, value=None, reason="there is no GPU whose allocator it could configure"),)
    if vendor in HIP:
        reason = (
            "guides set expandable_segments:True here; PyTorch supports it from ROCm 7 on, and on DTK it can hang"
            if vendor == "hygon"
            else "guides set expandable_segments:True here; PyTorch supports it on AMD from ROCm 7 on only"
        )
        return (Variable(name=name, value=None, reason=reason),)
    reason = "segments that can grow leave little unusable memory between them; the margin of the plan counts on it"
    if vendor == "unknown":
        reason += " (a card given by its size is taken to be NVIDIA's; on DTK take this line out)"
    return (Variable(name=name, value="expandable_segments:True", reason=reason),)


def _visibility(plan: Plan, target: Target, launcher: str) -> tuple[Variable, ...]:
    """Exactly one variable chooses the GPUs, and only where the launcher does not do it."""
    vendor = chosen_way(plan).hardware.gpu.vendor
    if vendor == "cpu":
        return ()
    own, other = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if vendor in HIP else ("CUDA_VISIBLE_DEVICES", "")
    if target.gpu_ids is None:
        reason = "no GPUs were chosen by number, so yours is respected where you set it"
        return (Variable(name=own, value=None, reason=reason),)
    ids = ",".join(map(str, gpu_ids_of(plan, target)))
    rows = []
    if vendor not in HIP:
        reason = "the numbers are those of nvidia-smi; CUDA by itself counts the fastest card first"
        rows.append(Variable(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason=reason))
    if launcher in ("deepspeed", "accelerate"):
        flag = "--include" if launcher == "deepspeed" else "--gpu_ids"
        reason = f"{flag} chooses the GPUs: the launcher sets CUDA_VISIBLE_DEVICES for the ranks and ignores yours"
        rows.append(Variable(name=own, value=None, reason=reason, unset=bool(other)))
        return tuple(rows)
    rows.append(Variable(name=own, value=ids, reason="the GPUs that were asked for; no second variable may say more"))
    if other:
        reason = f"HIP obeys it as well as {own}, and two that differ leave no GPU"
        rows.append(Variable(name=other, value=None, reason=reason, unset=True))
    return tuple(rows)


def host(vendor: Vendor, offload_optimizer: str, ranks: int, gpus_of_node: int | None = None) -> tuple[Variable, ...]:
    """What the ranks of a node share out among them; `ranks` of them. `gpus_of_node`: the GPUs that they chose theirs
    from, since other runs may have the rest, and as many cores."""
    reason = "tokenizers' threads and forked data loaders lock each other out"
    rows = [Variable(name="TOKENIZERS_PARALLELISM", value="false", reason=reason)]
    if offload_optimizer == "none" and vendor != "cpu":
        reason = "nothing heavy runs on the host, so the launcher's own choice does"
        rows.append(Variable(name="OMP_NUM_THREADS", value=None, reason=reason))
        return tuple(rows)
    # nproc obeys OMP_NUM_THREADS itself; rounding up keeps one thread for each rank of a small machine.
    cores = "$(env -u OMP_NUM_THREADS nproc)"
    sharers = max(ranks, gpus_of_node or 0)
    value = cores if sharers == 1 else f"$(( ({cores} + {sharers - 1}) / {sharers} ))"
    what = "the optimizer steps" if offload_optimizer != "none" else "the training runs"
    reason = (
        f"{what} on the CPU, so the cores are shared out among the ranks: torchrun would give each one thread, "
        "DeepSpeed's launcher each all of them"
    )
    if sharers > ranks:
        reason += f"; {sharers} GPUs are in the machine, and a run on the others needs its share"
    rows.append(Variable(name="OMP_NUM_THREADS", value=value, reason=reason))
    return tuple(rows)


def _left_out() -> tuple[Variable, ...]:
    rows = {
        "CUDA_LAUNCH_BLOCKING": "0 is what it is anyway, and 1 makes every kernel wait: for debugging only",
        "TORCH_USE_CUDA_DSA": "it is read when PyTorch is compiled; in an installed PyTorch it does nothing",
        "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions": "it rounds allocations up and so costs memory; "
        "growing segments have no use for it",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb": "it was for blocks of fixed size, which growing segments replace",
        "NCCL_P2P_DISABLE": "NCCL finds out by itself whether cards reach each other (RTX 40 cards do not); "
        "set by hand it slows down those that do",
        "NCCL_IB_DISABLE": "NCCL takes the fastest network that it finds, and does without what it does not find",
    }
    return tuple(Variable(name=name, value=None, reason=reason) for name, reason in rows.items())


def obeys_visible(plan: Plan, target: Target, launcher: str) -> bool:
    """Whether the user's own choice of visible GPUs decides where the ranks run."""
    hardware = chosen_way(plan).hardware
    by_ssh = launcher == "deepspeed" and hardware.nodes > 1
    return target.gpu_ids is None and hardware.gpu.vendor != "cpu" and not by_ssh
