"""Environment variables that contradict each other, or the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tightfit.hardware.doctor.row import Light, Row
from tightfit.hardware.probes.card import Card

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLOWING = {
    "NCCL_P2P_DISABLE": "cards that could reach each other directly go through the host",
    "NCCL_IB_DISABLE": "machines talk over plain sockets even where there is InfiniBand",
    "NCCL_SHM_DISABLE": "ranks of one machine talk over the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before it",
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the one before it",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the one before it",
}
_ROUNDING = re.compile(r"roundup_power2_divisions\s*:\s*(\[[^\]]*\]|[0-9]+)")
_OFF = ("", "0", "false", "no", "off")


def environment_rows(env: Mapping[str, str], cards: Sequence[Card], root: Path = Path("/")) -> list[Row]:
    rows = [
        *_visibility(env, cards),
        *_allocator(env, cards),
        *_slowing(env),
        *_interfaces(env, root),
        *_left_over(env),
        *_threads(env),
    ]
    if not rows:
        rows.append(_row("environment", "green", "no environment variable contradicts another"))
    return rows


def _row(name: str, light: Light, what: str, fix: str | None = None, *commands: str) -> Row:
    return Row(id=name, group="environment", light=light, what=what, fix=fix, commands=commands)


# --- which cards are seen -----------------------------------------------------------------------


def _visibility(env: Mapping[str, str], cards: Sequence[Card]) -> list[Row]:
    cuda, hip, rocr = (env.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP", "ROCR"))
    vendors = {card.vendor for card in cards}
    rows = []
    if cuda is not None and hip is not None and _ids(cuda) != _ids(hip):
        rows.append(
            _row(
                "visible-devices",
                "red" if vendors & {"amd", "hygon"} else "yellow",
                f"CUDA_VISIBLE_DEVICES={cuda} and HIP_VISIBLE_DEVICES={hip} choose different cards, and HIP obeys both",
                "keep one of them",
                "unset CUDA_VISIBLE_DEVICES" if vendors != {"nvidia"} else "unset HIP_VISIBLE_DEVICES",
            )
        )
    if hip is not None and rocr is not None and len(_ids(hip)) > len(_ids(rocr)):
        what = f"HIP_VISIBLE_DEVICES={hip} counts among the {len(_ids(rocr))} cards of ROCR_VISIBLE_DEVICES={rocr}"
        rows.append(_row("visible-rocr", "red", f"{what}, and torch refuses more than that", "keep one of them"))
    chosen = ("CUDA_VISIBLE_DEVICES", cuda) if vendors == {"nvidia"} else ("HIP_VISIBLE_DEVICES", hip)
    if chosen[1] is None and vendors and vendors != {"nvidia"}:
        chosen = ("CUDA_VISIBLE_DEVICES", cuda)
    if cards and chosen[1] is not None:
        rows += _chosen(chosen[0], chosen[1], cards, env)
    return rows


def _ids(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _chosen(name: str, text: str, cards: Sequence[Card], env: Mapping[str, str]) -> list[Row]:
    ids = _ids(text)
    if not ids or ids[0] in ("-1", "NoDevFiles"):
        what = f"{name}={text} hides all {len(cards)} GPUs"
        return [_row("visible-none", "yellow", what, "unset it to train on them", f"unset {name}")]
    strangers = [word for word in ids if word.isdigit() and int(word) >= len(cards)]
    if strangers and "ROCR_VISIBLE_DEVICES" not in env:
        named = f"{name}={text} names {', '.join(strangers)}"
        what = f"{named}, and there are {len(cards)} GPUs: it and all after it are hidden"
        return [_row("visible-unknown", "red", what, f"name numbers from 0 to {len(cards) - 1}")]
    names = {card.name for card in cards}
    if len(names) > 1 and name.startswith("CUDA") and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        what = (
            f"the GPUs differ, and CUDA counts the fastest first: {name}={text} may mean others than nvidia-smi shows"
        )
        return [_row("device-order", "yellow", what, "count as nvidia-smi does", "export CUDA_DEVICE_ORDER=PCI_BUS_ID")]
    return []


# --- the allocator ------------------------------------------------------------------------------


def _allocator(env: Mapping[str, str], cards: Sequence[Card]) -> list[Row]:
    said = {name: env[name].strip() for name in _ALLOCATORS if env.get(name, "").strip()}
    rows = []
    if len(set(said.values())) > 1:
        words = " and ".join(f"{name}={value}" for name, value in said.items())
        rows.append(
            _row(
                "allocator-twice",
                "yellow",
                f"{words} differ, and which of them counts depends on torch's release",
                "keep one of them; PYTORCH_CUDA_ALLOC_CONF is known to every release",
                *(f"unset {name}" for name in said if name != "PYTORCH_CUDA_ALLOC_CONF"),
            )
        )
    for name, value in said.items():
        wrong = [part for part in re.split(r",(?![^\[]*\])", value) if part.strip() and ":" not in part]
        if wrong:
            what = (
                f"{name}={value} has {wrong[0].strip()!r}, which is no option:value, and torch refuses to start with it"
            )
            rows.append(_row("allocator-option", "red", what, "write option:value, like expandable_segments:True"))
        hip = {card.vendor for card in cards} & {"amd", "hygon"}
        if hip and re.search(r"expandable_segments\s*:\s*True", value):
            what = f"{name}={value}: growing segments are for CUDA and ROCm 7, and can hang on Hygon's DTK"
            light: Light = "red" if "hygon" in hip else "yellow"
            rows.append(_row("allocator-hip", light, what, "leave it out on these cards", f"unset {name}"))
        rows += _rounding(name, value)
    return rows


def _rounding(name: str, value: str) -> list[Row]:
    """With N divisions a size is rounded up to one of N steps between two powers of two; 0 and 1 round nothing."""
    found = _ROUNDING.search(value)
    counts = [int(count) for count in re.findall(r"[0-9]+(?=\s*(?:$|[\],]))", found[1])] if found else []
    coarsest = min((count for count in counts if count > 1), default=None)
    if found is None or coarsest is None:
        return []
    rest = re.sub(r"^,|,$", "", value.replace(found[0], "").replace(",,", ","))
    what = (
        f"{name} has {found[0]}, which rounds allocations up by up to {100 / coarsest:.0f} % and so costs memory that "
        "no plan counts"
    )
    return [
        _row("allocator-rounding", "yellow", what, "leave it out", f"export {name}={rest}" if rest else f"unset {name}")
    ]


# --- the rest -----------------------------------------------------------------------------------


def _slowing(env: Mapping[str, str]) -> list[Row]:
    return [
        _row(
            f"slow-{name.lower()}",
            "yellow",
            f"{name}={env[name]}: {why}",
            "unset it unless it cured something",
            f"unset {name}",
        )
        for name, why in _SLOWING.items()
        if env.get(name, "").strip().lower() not in _OFF
    ]


def _interfaces(env: Mapping[str, str], root: Path) -> list[Row]:
    """A network card that is not there makes the start of every rank wait, and fail."""
    there = [path.name for path in root.glob("sys/class/net/*")]
    rows = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        said = env.get(name, "").strip()
        if not said or said.startswith("^") or not there:
            continue
        exact = said.startswith("=") or name.startswith("GLOO")
        wanted = [word for word in said.lstrip("=").split(",") if word]
        if not any(each == word or (not exact and each.startswith(word)) for word in wanted for each in there):
            what = f"{name}={said}, and this machine has {', '.join(sorted(there))}"
            rows.append(
                _row(f"interface-{name[:4].lower()}", "red", what, "name one of those, or unset it", f"unset {name}")
            )
    return rows


def _left_over(env: Mapping[str, str]) -> list[Row]:
    """A launcher's variables in a shell make a plain `python` believe that it is one rank of many."""
    held = [name for name in _LAUNCHER if env.get(name)]
    if len(held) < 2 or "SLURM_JOB_ID" in env:
        return []
    what = f"{', '.join(held)} are set in this shell, as a launcher sets them for its ranks"
    return [_row("launcher-variables", "yellow", what, "unset them", f"unset {' '.join(held)}")]


def _threads(env: Mapping[str, str]) -> list[Row]:
    if env.get("OMP_NUM_THREADS", "").strip() != "1":
        return []
    what = "OMP_NUM_THREADS=1: an optimizer that is offloaded steps on a single core"
    return [
        _row("threads", "yellow", what, "unset it: a run shares the cores out among its ranks", "unset OMP_NUM_THREADS")
    ]
