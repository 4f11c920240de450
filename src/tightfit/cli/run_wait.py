"""`tightfit run --wait-for-gpu`: until the GPUs that the command would take have room; nobody is asked to leave."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.cli.train_machine import Busy, describe_main_holder, reservations, wait_while_busy
from tightfit.hardware.occupancy import Device, occupancy
from tightfit.messages import Message, text
from tightfit.priced import amounts

FREE_SHARE = 0.9
"""Of a card's memory: with so much free nobody else is on it, where it is not known how much the command needs."""


def wait_for_gpus(
    need_bytes: int | None, count: int, say: Callable[[str], None], give_up: Callable[[], bool] = lambda: False
) -> bool:
    """Whether there is room on the first `count` GPUs that a program may see; False: it was given up.

    `need_bytes`: of each; None: not known, so nobody else may be on it.
    """
    return wait_while_busy(lambda: _look(need_bytes, count), say, give_up) is not None


def _look(need_bytes: int | None, count: int) -> bool:
    taken = {key: entry for entry in reservations().live() for key in entry.gpus}
    for device in occupancy().devices[:count]:
        if device.key in taken:
            raise Busy(
                Message("cli.gpu-use-wait", number=device.number, words=taken[device.key].words),
                Message("cli.wait-for-it"),
            )
        _check(device, need_bytes)
    return True


def _check(device: Device, need_bytes: int | None) -> None:
    free, total = device.free_bytes, device.total_bytes
    if free is None:
        return
    who = describe_main_holder(device)
    held, of = who and text("cli.holds-rest", who=who), (device.key, who) if who else (device.key,)
    if need_bytes is not None and free < need_bytes:
        needed, left = amounts(need_bytes, free)
        raise Busy(
            Message("cli.too-little-for-command", number=device.number, left=left, needed=needed, held=held),
            Message("cli.wait"),
            of,
        )
    if need_bytes is None and total is not None and free < FREE_SHARE * total:
        left, whole = amounts(free, total)
        raise Busy(
            Message("cli.too-little-free", number=device.number, left=left, whole=whole, held=held),
            Message("cli.wait"),
            of,
        )
