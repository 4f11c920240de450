"""What `tightfit measure` found on a machine: one JSON file, its only reader and its only writer.

A file lies in the user's data folder under the machine's fingerprint, so that a home folder that many machines share
has one for each kind of them. It holds enough of the machine to plan for it elsewhere: `--gpus FILE`.

What is measured is said of the machine as it was: other GPUs, or another driver, and the file counts for nothing until
it is measured again. That, a torn file and one of another version are said in one sentence, and the defaults used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tightfit.hardware.words import MAX_GPUS_PER_NODE, MAX_NODES, MAX_SIZE, MAX_WORD, parse_size, recognise
from tightfit.inputs.records import as_record, read_json, record_text
from tightfit.inputs.spelling import shown
from tightfit.inputs.surroundings import data_folder
from tightfit.messages import Listing, Message, Said, say_why
from tightfit.owned import replace_file
from tightfit.types import Gpu, Hardware, HardwareError, Measured, Vendor


class MeasuredPart(NamedTuple):
    """One part of a measurement."""

    name: Message
    budget_s: float  # after so long it begins nothing more
    quick_s: float  # likewise with `--quick`


PARTS: Mapping[str, MeasuredPart] = {
    "products": MeasuredPart(Message("measure.part-products"), 10, 3),
    "attention": MeasuredPart(Message("measure.part-attention"), 12, 4),
    "memory": MeasuredPart(Message("measure.part-memory"), 3, 1),
    "launch": MeasuredPart(Message("measure.part-launch"), 2, 1),
    "host_link": MeasuredPart(Message("measure.part-host-link"), 5, 2),
    "host_optimizer": MeasuredPart(Message("measure.part-host-optimizer"), 6, 2),
    "host_memory": MeasuredPart(Message("measure.part-host-memory"), 3, 1),
    "collectives": MeasuredPart(Message("measure.part-collectives"), 10, 3),
    "nvme": MeasuredPart(Message("measure.part-nvme"), 8, 8),
    "network": MeasuredPart(Message("measure.part-network"), 10, 10),
}
"""In the order in which they are measured."""
MOST_BYTES = 16 * 2**20
MOST_PER_S, MOST_S = 1e18, 60.0
"""No rate is higher than that, in whatever unit, and nothing that is timed takes longer."""
SHARED = ("host_link_together", "host_optimizer_together", "link")
"""What GPUs have to share: with fewer of them it is another rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """By what a machine is known again. Its name is no part of it: the nodes of a cluster are alike."""

    gpus: tuple[str, ...]  # by the names that their driver has for them; none: its CPU trains
    driver: str | None
    cpu: str | None
    cores: int
    ram_gib: int

    @property
    def key(self) -> str:
        """The name of its file."""
        first = "".join(letter if letter.isalnum() else "-" for letter in (*self.gpus, "CPU")[0].lower())
        told = json.dumps(asdict(self), sort_keys=True).encode()
        return f"{max(len(self.gpus), 1)}x-{first[:40]}-{hashlib.sha256(told).hexdigest()[:12]}"

    def changes_since(self, other: Fingerprint) -> Iterator[Message]:
        """What is otherwise now than it was."""
        if self.gpus != other.gpus:
            before, now = (
                f"{len(each.gpus)} × {each.gpus[0]}" if each.gpus else Message("measure.no-gpu")
                for each in (other, self)
            )
            yield Message("measure.other-gpus", before=before, now=now)
        if self.driver != other.driver:
            yield Message("measure.other-driver", before=other.driver or "?", now=self.driver or "?")
        if (self.cpu, self.cores) != (other.cpu, other.cores):
            yield Message("measure.other-cpu", before=f"{other.cpu} ({other.cores})", now=f"{self.cpu} ({self.cores})")
        if self.ram_gib != other.ram_gib:
            yield Message("measure.other-ram", before=other.ram_gib, now=self.ram_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """What one needs to know of a machine to plan for it."""

    card: str  # its driver's name for it
    vendor: Vendor
    memory_bytes: int
    arch: str | None = None
    fp16: bool | None = None
    nodes: int = 1
    gpus_per_node: int = 1
    host_ram_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The file."""

    SCHEMA: ClassVar[int] = 1
    tightfit: str  # the version that measured
    on: str  # the day
    quick: bool
    fingerprint: Fingerprint
    machine: MeasuredMachine
    rates: Mapping[str, float]
    marked: tuple[str, ...] = ()  # the rates that were measured while somebody else was on the GPUs
    missing: Mapping[str, Message | str] = field(default_factory=dict)  # part → why it was not measured
    raw: Any = None  # everything that the rates come from, by part and rank

    @property
    def measured(self) -> Measured:
        return Measured(on=self.on, machine=self.fingerprint.key, rates=dict(self.rates), marked=frozenset(self.marked))


def place_of(fingerprint: Fingerprint) -> Path:
    return _folder() / f"{fingerprint.key}.json"


def _folder() -> Path:
    return data_folder() / "measured"


def write_measured(path: Path, found: Measurement) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, record_text(found).encode())


def read_measured(path: Path) -> Measurement:
    """The measurement in a file, or HardwareError that says what is wrong with it."""
    try:
        return _parse(read_json(path, most_bytes=MOST_BYTES, finite=True))
    except FileNotFoundError:
        raise HardwareError(Message("measure.no-file", path=path)) from None
    except OSError as error:
        raise HardwareError(Message("measure.unreadable", path=path, why=say_why(error))) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise HardwareError(Message("measure.not-ours", path=path, why=Message("measure.torn"))) from None
    except ValueError as error:
        raise HardwareError(Message("measure.not-ours", path=path, why=str(error))) from None


def _parse(tree: object) -> Measurement:
    found = as_record(tree, Measurement)
    for name, rate in found.rates.items():
        least, most = (0.0, MOST_S) if name.endswith("_s") else (1.0, MOST_PER_S)
        if not least <= rate <= most:
            raise ValueError(f"rates.{name} cannot be {rate}")
    date.fromisoformat(found.on)
    there = found.machine
    for name, number, highest in (
        ("memory_bytes", there.memory_bytes, MAX_SIZE),
        ("host_ram_bytes", there.host_ram_bytes, MAX_SIZE),
        ("gpus_per_node", there.gpus_per_node, MAX_GPUS_PER_NODE),
        ("nodes", there.nodes, MAX_NODES),
    ):
        if number is not None and not 1 <= number <= highest:
            raise ValueError(f"machine.{name} cannot be {shown(number)}")
    for name, word in (("card", there.card), ("arch", there.arch or "")):
        if len(word) > MAX_WORD or not word.isprintable():
            raise ValueError(f"machine.{name} cannot be {shown(word)}")
    return found


def find_measured(fingerprint: Fingerprint, gpus: int = 1) -> tuple[Measured | None, tuple[Message, ...]]:
    """What was measured on this machine as it is now, and what is to be said about it. `gpus`: as many may be used.

    Of files of other machines nothing is said, unless the machine is this one as it was: the same GPUs by name, or the
    same host.
    """
    path = place_of(fingerprint)
    try:
        if path.is_file():
            return _attach(read_measured(path), gpus)
        others = sorted(_folder().glob("*.json"))
    except HardwareError as error:
        return None, (Message("measure.file-unused", problem=error.said),)
    except OSError:  # a folder that may not be looked into
        return None, ()
    for other in others:
        try:
            before = read_measured(other)
        except HardwareError:
            continue
        then = before.fingerprint
        same_host = (then.cpu, then.cores, then.ram_gib) == (fingerprint.cpu, fingerprint.cores, fingerprint.ram_gib)
        if same_host and (then.gpus[:1] == fingerprint.gpus[:1] or not then.gpus or not fingerprint.gpus):
            changes = Listing(fingerprint.changes_since(then), "and")
            return None, (Message("measure.changed-since", on=before.on, changes=changes),)
    return None, ()


def _attach(found: Measurement, gpus: int) -> tuple[Measured, tuple[Message, ...]]:
    said = [Message("measure.here", on=found.on)]
    if (had := found.machine.gpus_per_node) < gpus:  # the others were hidden from it
        found = replace(found, rates={name: rate for name, rate in found.rates.items() if name not in SHARED})
        said.append(Message("measure.fewer-gpus", had=had, gpus=gpus))
    if found.marked:
        said.append(Message("measure.was-busy", on=found.on))
    return found.measured, tuple(said)


def read_machine(path: Path, host_ram: str | None = None, nvme: str | None = None) -> Hardware:
    """The machine that a measurement was made on, with it; `host_ram` and `nvme` overrule what it says."""
    found = read_measured(path)
    there = found.machine
    gpu, sentence = recognise(there.card, there.memory_bytes) if there.vendor != "cpu" else (None, None)
    if gpu is None:
        gpu = Gpu(name=there.card, vendor=there.vendor, memory_bytes=there.memory_bytes, fp16=there.fp16)
    because: list[Said] = [Message("measure.of-file", path=path.name, on=found.on)]
    because += [sentence] if sentence else []
    return Hardware(
        gpu=replace(gpu, arch=there.arch or gpu.arch),
        nodes=there.nodes,
        gpus_per_node=there.gpus_per_node,
        host_ram_bytes=there.host_ram_bytes if host_ram is None else parse_size(host_ram),
        nvme_bytes=None if nvme is None else parse_size(nvme),
        measured=found.measured,
        because=tuple(because),
    )
