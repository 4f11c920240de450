"""The scan on NVIDIA's cards by `scan.cu`, for what it is written for; Triton's kernels do the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from tightfit.mamba import cuda
from tightfit.mamba.arguments import Gradients, Scan, as_bytes
from tightfit.mamba.cuda import LaunchSize

STATES, CHANNELS, BORDER = 16, 64, 64  # of a channel, of a program, and steps between two states that are kept
WARPS = 4  # of a program of the backward pass
SHARED_BYTES = WARPS * (BORDER // 4) * 16 * STATES * 4
FORWARD_PROGRAMS, BACKWARD_PROGRAMS, UNCUT = 6400, 2048, 512
"""Wanted at least, so that the last to end hold up little. With as many sequences and tiles as `UNCUT` time is not cut:
that the card is not full at the end costs less than a pass over all segments. Measured on an H200."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HALVES = (torch.bfloat16, torch.float16)

POINTERS = (
    "u", "delta", "z", "dout", "A", "D", "bias", "B", "C", "rates", "skips", "biases", "packed", "starts", "first",
    "ends", "spans", "begins", "borders", "last", "dfirst", "parts_A", "parts_D", "parts_bias", "sums", "dA", "dD",
    "dbias", "dB", "dC", "out", "du", "ddelta", "dz",
)  # fmt: skip
STRIDED = {
    "u": "u", "delta": "t", "z": "z", "dout": "g", "out": "o", "du": "du", "ddelta": "dt", "dz": "dz", "starts": "s",
    "B": "B", "C": "C", "dB": "dB", "dC": "dC",
}  # fmt: skip
"""Tensors with their letters: of each the kernels have the strides of the batch and of the length."""
BY_STEP = ("u", "delta", "z", "dout", "out", "du", "ddelta", "dz")
BY_STATE = ("B", "C", "dB", "dC")  # of these that of the states as well
OF_KINDS = ("A", "D", "bias", "B", "C", "dB", "dC")
COUNTS = ("batch", "channels", "length", "padded", "segment", "segments", "border_count", "tiles", "reverse")


SWITCHES = ("HALF", "LOG_RATES", "SOFTPLUS", "HAS_D", "HAS_Z", "HAS_BIAS", "HAS_STARTS")
TURNS = tuple(f"-D{name}=0" for name in SWITCHES)  # one kernel, whatever the others are asked for


class _Scan(ctypes.Structure):
    """As `Scan` in scan.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((f"{letter}_b", ctypes.c_longlong) for letter in STRIDED.values()),
        *((f"{letter}_l", ctypes.c_int) for letter in STRIDED.values()),
        *((f"{name}_n", ctypes.c_int) for name in BY_STATE),
        *((f"kind_{name}", ctypes.c_int) for name in OF_KINDS),
        *((name, ctypes.c_int) for name in COUNTS),
    )


def fits(scan: Scan, dout: Tensor | None = None) -> bool:
    """Whether the kernels can do it: 16-bit inputs that lie in order, and 16 states."""
    u, (_, channels, states, _) = scan.u, scan.sizes
    if not u.is_cuda or u.dtype not in HALVES or states != STATES or channels % CHANNELS:
        return False
    given = (scan.A, scan.B, scan.C, scan.D, scan.delta_bias, scan.initial_state)
    wide = [each for each in (u, scan.delta, scan.z, dout) if each is not None]
    return (
        all(each.dtype == u.dtype and (_is_in_order(each) or _is_in_order(each.mT)) for each in wide)
        and all(each is None or each.dtype in KINDS for each in given)
        and torch.cuda.get_device_capability(u.device) >= (8, 0)
        and cuda.find_compiler() is not None
    )


def _is_in_order(wide: Tensor) -> bool:
    """Two channels can be read at once, and a stride in bytes has 32 bits."""
    batch, channel, time = wide.stride()
    aligned = wide.data_ptr() % 4 == 0 and batch % 2 == time % 2 == wide.shape[1] % 2 == 0
    return channel == 1 and aligned and time < 1 << 30


def turn(wide: Tensor) -> Tensor:
    """With the second to last dimension last in memory; the same tensor if it is that already."""
    if _is_in_order(wide):
        return wide
    batch, rows, length = wide.shape
    turned = wide.new_empty(batch, length, rows).mT
    given = _Scan(channels=rows, length=length, u=wide.data_ptr(), out=turned.data_ptr())
    given.u_b, given.u_l, given.o_b, given.o_l = wide.stride(0), wide.stride(1) * 2, rows * length, rows * 2
    size = LaunchSize((-(-length // 64), -(-rows // 64), batch), 256)
    cuda.launch("scan.cu", TURNS, "turn", size, given, wide.device.index)
    return turned


def _turn_back(wide: Tensor) -> Tensor:
    """With time last."""
    return turn(wide.mT).mT


class Cut:
    """A program has 64 channels and a segment of the time."""

    def __init__(self, batch: int, channels: int, length: int, programs: int) -> None:
        self.batch, self.channels, self.length = batch, channels, length
        self.tiles, self.borders = channels // CHANNELS, -(-length // BORDER)
        self.padded = -(-length // 4) * 4
        wanted = 1 if batch * self.tiles >= UNCUT else max(1, programs // (batch * self.tiles))
        self.segment = -(-self.borders // min(wanted, self.borders)) * BORDER
        self.segments = -(-length // self.segment)

    @property
    def counts(self) -> dict[str, int]:
        return {
            "batch": self.batch, "channels": self.channels, "length": self.length, "padded": self.padded,
            "segment": self.segment, "segments": self.segments, "border_count": self.borders, "tiles": self.tiles,
        }  # fmt: skip

    def arrange(self, *, backward: bool) -> tuple[dict[str, int], int]:
        """Where in the room of a pass each of its buffers begins, in bytes, and how large that is. What a segment adds
        is not needed any more when its parts of the gradients are written, which take the same place."""
        each = self.batch * self.segments * self.channels
        sizes = {
            "rates": self.channels * STATES, "skips": self.channels, "biases": self.channels,
            "packed": self.batch * self.padded * 2 * STATES, "begins": each * STATES, "ends": each * STATES,
            "spans": each,
        }  # fmt: skip
        if backward:
            sizes |= {"parts_bias": each, "sums": self.tiles * self.batch * self.padded * 2 * STATES}
        places, size = {}, 0
        for name, count in sizes.items():
            places[name] = size * 4
            size += count
        if backward:
            places |= {"parts_A": places["ends"], "parts_D": places["spans"]}
        return places, size


@cache
def _arrange_pass(
    batch: int, channels: int, length: int, programs: int, backward: bool
) -> tuple[Cut, dict[str, int], int]:  # fmt: skip
    cut = Cut(batch, channels, length, programs)
    return cut, *cut.arrange(backward=backward)


@cache
def _options(*asked: bool) -> tuple[str, ...]:
    return tuple(f"-D{name}={int(value)}" for name, value in zip(SWITCHES, asked, strict=True))


class _ScanPass:
    """One direction of a scan: its tensors, and the kernels that it launches. All that a training step does not do on
    the card is done while the card waits: so it is as little as may be."""

    def __init__(self, scan: Scan, programs: int, *, backward: bool, **tensors: Tensor | None) -> None:
        batch, channels, _, length = scan.sizes
        self.cut, places, size = _arrange_pass(batch, channels, length, programs, backward)
        self._device, self._index = scan.u.device, scan.u.device.index
        self._options = _options(
            scan.u.dtype == torch.float16, scan.log_rates, scan.delta_softplus, scan.D is not None, scan.z is not None,
            scan.delta_bias is not None, scan.starts is not None,
        )  # fmt: skip
        self._room = torch.empty(size, dtype=torch.float32, device=self._device)
        base = self._room.data_ptr()
        self._held: list[Tensor] = []
        self._given = _Scan(**self.cut.counts, **{name: base + offset for name, offset in places.items()})
        self.take(
            u=scan.u, delta=scan.delta, z=scan.z, starts=as_bytes(scan.starts), A=scan.A.contiguous(), D=scan.D,
            bias=scan.delta_bias, B=scan.B, C=scan.C, **tensors,
        )  # fmt: skip
        cells = max(batch * self.cut.padded, channels) * STATES
        self.launch("prepare", LaunchSize((-(-cells // 256), 1, 1), 256))

    def take(self, **tensors: Tensor | None) -> None:
        given, held = self._given, self._held
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            held.append(tensor)  # until the kernels that read it are launched
            setattr(given, name, tensor.data_ptr())
            if letter := STRIDED.get(name):
                strides = tensor.stride()
                setattr(given, f"{letter}_b", strides[0])
                # Those of the length are in bytes where a kernel reads step by step.
                setattr(given, f"{letter}_l", strides[-1] * 2 if name in BY_STEP else strides[-1])
                if name in BY_STATE:
                    setattr(given, f"{name}_n", strides[1])
            if name in OF_KINDS:
                setattr(given, f"kind_{name}", KINDS[tensor.dtype])

    def launch(self, kernel: str, size: LaunchSize | None = None) -> None:
        size = size or LaunchSize((self.cut.tiles, self.cut.segments, self.cut.batch), 32)
        cuda.launch("scan.cu", self._options, kernel, size, self._given, self._index)

    def begin(self, first: Tensor | None, by: str) -> None:
        """What each segment begins with: from `first` on, by what that kernel says that each adds."""
        if first is not None:
            self.take(first=first.float().contiguous())
        cut, self._given.reverse = self.cut, int(by == "wanted")
        if cut.segments > 1:  # nobody asks what the last one adds
            self.launch(by, LaunchSize((cut.tiles, cut.segments - 1, cut.batch), 32))
        self.launch("combine", LaunchSize((-(-cut.channels * STATES // 512), cut.batch, 1), 128))


def run_forward(
    scan: Scan, make_places: Callable[[], tuple[Tensor, Tensor, Tensor]], programs: int = FORWARD_PROGRAMS
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the last state, and the states at the borders, in the places that are made for them."""
    forward = _ScanPass(_in_order(scan), programs, backward=False)
    forward.begin(scan.initial_state, "states")
    out, last, borders = make_places()
    place = out if _is_in_order(out) else out.new_empty(out.mT.shape).mT
    forward.take(out=place, last=last, borders=borders)
    forward.launch("forward")
    return out if place is out else _turn_back(place), last, borders


def _in_order(scan: Scan) -> Scan:
    if all(each is None or _is_in_order(each) for each in (scan.u, scan.delta, scan.z)):
        return scan
    return replace(scan, u=turn(scan.u), delta=turn(scan.delta), z=None if scan.z is None else turn(scan.z))


def run_backward(
    scan: Scan, borders: Tensor, dout: Tensor, dlast: Tensor | None, places: Mapping[str, Tensor],
    out: Tensor | None = None, programs: int = BACKWARD_PROGRAMS,
) -> Gradients:  # fmt: skip
    """All gradients, in the dtypes of what they are gradients of; those of `places` go there. `out`: where the output,
    computed again, goes."""
    (batch, channels, states, length), turned = scan.sizes, _in_order(scan)
    again = out if out is None or _is_in_order(out) else torch.empty_like(turned.u)
    back = _ScanPass(turned, programs, backward=True, dout=turn(dout), borders=borders, out=again)
    back.begin(dlast, "wanted")

    def place(name: str, *shape: int) -> Tensor:
        given = getattr(scan, name)
        return places[name] if name in places else torch.empty(shape, dtype=given.dtype, device=given.device)

    def place_wide(name: str) -> Tensor:
        fits = name in places and _is_in_order(places[name])
        return places[name] if fits else torch.empty_like(getattr(turned, name))

    wide = {name: place_wide(name) for name in ("u", "delta", "z") if getattr(scan, name) is not None}
    sums = {
        "A": place("A", channels, states), "B": place("B", batch, states, length),
        "C": place("C", batch, states, length), "D": None if scan.D is None else place("D", channels),
        "delta_bias": None if scan.delta_bias is None else place("delta_bias", channels), "initial_state": None,
    }  # fmt: skip
    if scan.initial_state is not None:
        sums["initial_state"] = scan.u.new_empty(batch, channels, states, dtype=torch.float32)
    back.take(
        dA=sums["A"], dB=sums["B"], dC=sums["C"], dD=sums["D"], dbias=sums["delta_bias"],
        dfirst=sums["initial_state"], du=wide["u"], ddelta=wide["delta"], dz=wide.get("z"),
    )  # fmt: skip
    back.launch("backward", LaunchSize((back.cut.tiles, back.cut.segments, batch), WARPS * 32, SHARED_BYTES))
    cells = max(channels * STATES, batch * back.cut.padded * 2 * STATES)
    back.launch("finish", LaunchSize((-(-cells // 256), 2, 1), 256))
    for name, found in wide.items():
        if name in places:
            wide[name] = found if found is places[name] else places[name].copy_(found)
        elif not _is_in_order(getattr(scan, name)):
            wide[name] = _turn_back(found)
    if out is not None and again is not None and again is not out:
        out.copy_(again)
    return Gradients(**{"z": None} | wide | sums)  # type: ignore[arg-type]
