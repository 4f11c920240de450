"""Environment variables that contradict each other, or the machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tightfit.hardware.doctor.row import Check, Light
from tightfit.hardware.probes.card import Card
from tightfit.messages import Listing, Message

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLOWING = {
    "NCCL_P2P_DISABLE": Message("doctor.p2p-off"),
    "NCCL_IB_DISABLE": Message("doctor.infiniband-off"),
    "NCCL_SHM_DISABLE": Message("doctor.shm-off"),
    "CUDA_LAUNCH_BLOCKING": Message("doctor.blocking"),
    "HIP_LAUNCH_BLOCKING": Message("doctor.blocking"),
    "AMD_SERIALIZE_KERNEL": Message("doctor.blocking"),
}
_ROUNDING = re.compile(r"roundup_power2_divisions\s*:\s*(\[[^\]]*\]|[0-9]+)")
_OFF = ("", "0", "false", "no", "off")


def environment_rows(env: Mapping[str, str], cards: Sequence[Card], root: Path = Path("/")) -> list[Check]:
    rows = [*_visibility(env, cards), *_allocator(env, {card.vendor for card in cards} & {"amd", "hygon"})]
    for name, why in _SLOWING.items():
        if env.get(name, "").strip().lower() not in _OFF:
            what = Message("doctor.slow", name=name, value=env[name], why=why)
            rows.append(_row(f"slow-{name.lower()}", "yellow", what, Message("doctor.slow-fix"), f"unset {name}"))
    # A network card that is not there makes the start of every rank wait, and fail.
    there = [path.name for path in root.glob("sys/class/net/*")]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        said = env.get(name, "").strip()
        if not said or said.startswith("^") or not there:
            continue
        exact = said.startswith("=") or name.startswith("GLOO")
        wanted = [word for word in said.lstrip("=").split(",") if word]
        if not any(each == word or (not exact and each.startswith(word)) for word in wanted for each in there):
            what = Message("doctor.interface", name=name, value=said, there=Listing(sorted(there)))
            fix = Message("doctor.interface-fix")
            rows.append(_row(f"interface-{name[:4].lower()}", "red", what, fix, f"unset {name}"))
    # A launcher's variables in a shell make a plain `python` believe that it is one rank of many.
    held = [name for name in _LAUNCHER if env.get(name)]
    if len(held) > 1 and "SLURM_JOB_ID" not in env:
        what, fix = Message("doctor.launcher-variables", names=Listing(held)), Message("doctor.launcher-variables-fix")
        rows.append(_row("launcher-variables", "yellow", what, fix, f"unset {' '.join(held)}"))
    if env.get("OMP_NUM_THREADS", "").strip() == "1":
        what, fix = Message("doctor.one-thread"), Message("doctor.one-thread-fix")
        rows.append(_row("threads", "yellow", what, fix, "unset OMP_NUM_THREADS"))
    return rows or [_row("environment", "green", Message("doctor.environment"))]


def _row(name: str, light: Light, what: Message, fix: Message | None = None, *commands: str) -> Check:
    return Check(name, "environment", light, what, fix, commands)


def _visibility(env: Mapping[str, str], cards: Sequence[Card]) -> Iterator[Check]:
    """Which cards are seen."""
    values = {each: env.get(f"{each}_VISIBLE_DEVICES") for each in ("CUDA", "HIP", "ROCR")}
    ids = {each: [word.strip() for word in (text or "").split(",") if word.strip()] for each, text in values.items()}
    cuda, hip, rocr = values.values()
    vendors = {card.vendor for card in cards}
    if cuda is not None and hip is not None and ids["CUDA"] != ids["HIP"]:
        what = Message("doctor.visible-devices", cuda=cuda, hip=hip)
        command = "unset CUDA_VISIBLE_DEVICES" if vendors != {"nvidia"} else "unset HIP_VISIBLE_DEVICES"
        light: Light = "red" if vendors & {"amd", "hygon"} else "yellow"
        yield _row("visible-devices", light, what, Message("doctor.keep-one"), command)
    if hip is not None and rocr is not None and len(ids["HIP"]) > len(ids["ROCR"]):
        what = Message("doctor.visible-rocr", hip=hip, rocr=rocr, count=len(ids["ROCR"]))
        yield _row("visible-rocr", "red", what, Message("doctor.keep-one"))
    side = "CUDA" if vendors == {"nvidia"} or hip is None else "HIP"
    name, text, chosen = f"{side}_VISIBLE_DEVICES", values[side], ids[side]
    if not cards or text is None:
        return
    strangers = [word for word in chosen if word.isdigit() and int(word) >= len(cards)]
    if not chosen or chosen[0] in ("-1", "NoDevFiles"):
        what = Message("doctor.visible-none", name=name, value=text, count=len(cards))
        yield _row("visible-none", "yellow", what, Message("doctor.visible-none-fix"), f"unset {name}")
    elif strangers and rocr is None:
        what = Message("doctor.visible-unknown", name=name, value=text, unknown=Listing(strangers), count=len(cards))
        yield _row("visible-unknown", "red", what, Message("doctor.visible-unknown-fix", last=len(cards) - 1))
    elif len({card.name for card in cards}) > 1 and side == "CUDA" and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        what, fix = Message("doctor.device-order", name=name, value=text), Message("doctor.device-order-fix")
        yield _row("device-order", "yellow", what, fix, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def _allocator(env: Mapping[str, str], hip: Collection[str]) -> Iterator[Check]:
    """`hip`: the makers of cards here whose allocator cannot do all that CUDA's can."""
    said = {name: env[name].strip() for name in _ALLOCATORS if env.get(name, "").strip()}
    if len(set(said.values())) > 1:
        settings = Listing((f"{name}={value}" for name, value in said.items()), "and")
        what, fix = Message("doctor.allocator-twice", settings=settings), Message("doctor.allocator-twice-fix")
        others = (f"unset {name}" for name in said if name != "PYTORCH_CUDA_ALLOC_CONF")
        yield _row("allocator-twice", "yellow", what, fix, *others)
    for name, value in said.items():
        wrong = [part for part in re.split(r",(?![^\[]*\])", value) if part.strip() and ":" not in part]
        if wrong:
            what = Message("doctor.allocator-option", name=name, value=value, part=wrong[0].strip())
            yield _row("allocator-option", "red", what, Message("doctor.allocator-option-fix"))
        if hip and re.search(r"expandable_segments\s*:\s*True", value):
            what, fix = Message("doctor.allocator-hip", name=name, value=value), Message("doctor.allocator-hip-fix")
            yield _row("allocator-hip", "red" if "hygon" in hip else "yellow", what, fix, f"unset {name}")
        # With N divisions a size is rounded up to one of N steps between two powers of two; 0 and 1 round nothing.
        found = _ROUNDING.search(value)
        counts = [int(count) for count in re.findall(r"[0-9]+(?=\s*(?:$|[\],]))", found[1])] if found else []
        coarsest = min((count for count in counts if count > 1), default=None)
        if found is not None and coarsest is not None:
            rest = re.sub(r"^,|,$", "", value.replace(found[0], "").replace(",,", ","))
            what = Message("doctor.allocator-rounding", name=name, setting=found[0], percent=100 / coarsest)
            command = f"export {name}={rest}" if rest else f"unset {name}"
            yield _row("allocator-rounding", "yellow", what, Message("doctor.leave-out"), command)
