"""What stands between the peak and the card: allocator slack, context, communicator; and the reasons in words."""

from __future__ import annotations

from collections.abc import Mapping

from tightfit.memory.job import Components
from tightfit.messages import Listing, Message, Said, texts_of
from tightfit.types import Gpu, Phase, PhaseName

CONTEXT_BYTES = int(0.75 * 2**30)
"""The CUDA context with its kernels: driver's figure less the allocator's, in the measured rows 0.6 to 0.9 GiB."""
PROCESS_BYTES = 2**29  # a rank on the CPU before it has a model: Python, torch and DeepSpeed held 0.50 to 0.53 GiB
ALLOCATOR_SLACK = 0.03  # runs capped this little above their peak still complete, with expandable segments on
COMMUNICATOR_BYTES = int(0.4 * 2**30)
"""NCCL's channel buffers for one communicator of a node. Not measured by us: rehearsals communicate nothing."""
SAVED_PIECE_BYTES = 64 * 2**20
"""What saving moves to the host at a time (`HOST_BYTES` of train/saved_model.py), in fp32."""


def beside(peak: int, world: int, gpu: Gpu | None, groups: int = 1) -> Components:
    """What a card has to hold beside tensors. A CPU that stands in has the process itself, and no NCCL's buffers.
    `groups`: of ranks among which this one exchanges tensors."""
    on_cpu = gpu is not None and gpu.vendor == "cpu"
    return {
        "allocator_slack": int(peak * ALLOCATOR_SLACK),
        "context": PROCESS_BYTES if on_cpu else CONTEXT_BYTES,
        "communicator": groups * COMMUNICATOR_BYTES if world > 1 and not on_cpu else 0,
    }


def usable(memory_bytes: int, extra: Mapping[str, int]) -> Message:
    """What is left of a card for tensors, and what goes where else."""
    gib = 2**30
    room = memory_bytes - extra["context"] - extra["communicator"]
    left = room / (1 + ALLOCATOR_SLACK)
    communicator = extra["communicator"]
    return Message(
        "price.usable",
        card=memory_bytes / gib,
        tensors=max(left, 0) / gib,
        context=extra["context"] / gib,
        shared=Message("price.communicator-share", size=communicator / gib) if communicator else "",
        slack=max(room - left, 0) / gib,
    )


def name_component(component: str) -> Said:
    """As people read it: `master_weights` of a phase is master weights."""
    return Message(f"part.{component}") if component in texts_of("part") else component.replace("_", " ")


def reasons(
    phases: Mapping[PhaseName, Phase], peak_phase: PhaseName, engine_says: tuple[Said, ...] = ()
) -> tuple[Said, ...]:
    peak = phases[peak_phase]
    largest = sorted(peak.components, key=lambda name: -peak.components[name])[:2]
    parts = Listing(map(name_component, largest), "and")
    said: list[Said] = [Message("price.peak-phase", phase=peak_phase, parts=parts), *engine_says]
    if phases["init"].total_bytes > peak.total_bytes:
        said.append(Message("price.init-is-largest"))
    return tuple(said)
