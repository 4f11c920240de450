"""A machine's measurement: its file, whose it is, and what is said when it is of no use."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.hardware.machine import fingerprint_of, look, this_machine
from tightfit.hardware.measured import (
    Fingerprint,
    MeasuredMachine,
    Measurement,
    find_measured,
    place_of,
    read_measured,
    write_measured,
)
from tightfit.hardware.named import read_hardware
from tightfit.messages import Message
from tightfit.types import HardwareError

EIGHT = Fingerprint(gpus=("NVIDIA H200",) * 8, driver="570.86.15", cpu="Xeon", cores=192, ram_gib=2015)
FOUND = Measurement(
    tightfit="0.1.0",
    on="2026-11-16",
    quick=False,
    fingerprint=EIGHT,
    machine=MeasuredMachine(
        card="NVIDIA H200",
        vendor="nvidia",
        memory_bytes=143771 * 2**20,
        arch="sm_90",
        gpus_per_node=8,
        host_ram_bytes=2015 * 2**30,
    ),
    rates={"products.bf16": 7e14, "memory": 3e12, "launch_s": 2e-5, "product_start_s": 0.0},
    marked=("memory",),
    missing={"nvme": Message("measure.in-memory", folder="/tmp"), "network": "connection refused"},  # noqa: S108
    raw={"memory": [{"copy": {"bytes": 1, "seconds": 1e-9}}]},
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # the cards of the machine itself stay out of sight


def ids(said: Any) -> list[str]:
    return [each.id for each in said]


def test_what_is_written_is_read_again_and_found_by_the_machine() -> None:
    write_measured(place_of(EIGHT), FOUND)
    assert read_measured(place_of(EIGHT)) == FOUND
    measured, said = find_measured(EIGHT)
    assert measured is not None
    assert measured.rates == FOUND.rates
    assert measured.marked == {"memory"}
    assert ids(said) == ["measure.here", "measure.was-busy"]
    assert str(said[0]) == "Measured here on 2026-11-16."


def test_a_machine_that_was_never_measured_says_nothing() -> None:
    assert find_measured(EIGHT) == (None, ())


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (replace(EIGHT, driver="580.1"), "measure.other-driver"),
        (replace(EIGHT, gpus=EIGHT.gpus[:4]), "measure.other-gpus"),
        (replace(EIGHT, gpus=(), driver=None), "measure.other-gpus"),
    ],
)
def test_a_machine_that_has_changed_since_is_told_so(now: Fingerprint, change: str) -> None:
    write_measured(place_of(EIGHT), FOUND)
    measured, (said,) = find_measured(now)
    assert measured is None
    assert said.id == "measure.changed-since"
    assert change in ids(said.fields["changes"].parts)  # type: ignore[attr-defined]


def test_another_machine_of_a_shared_home_is_no_news() -> None:
    write_measured(place_of(EIGHT), FOUND)
    assert find_measured(replace(EIGHT, gpus=("NVIDIA L4",), cpu="EPYC", cores=64, ram_gib=250)) == (None, ())


def spoilt(**changes: Any) -> str:
    write_measured(place_of(EIGHT), FOUND)
    return json.dumps({**json.loads(place_of(EIGHT).read_text(encoding="utf-8")), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda: spoilt()[:400], "it is torn, or no JSON"),
        (lambda: spoilt(schema=2), "schema 2, and this version knows 1"),
        (lambda: spoilt(rates={"memory": -1}), "rates.memory cannot be -1"),
        (lambda: spoilt(rates={"memory": 0}), "rates.memory cannot be 0"),
        (lambda: spoilt(rates={"memory": "fast"}), "rates.memory cannot be"),
        (lambda: spoilt(rates={"memory": 1e-300}), "rates.memory cannot be"),
        (lambda: spoilt(rates={"memory": 1e300}), "rates.memory cannot be"),
        (lambda: spoilt(rates={"launch_s": 1e9}), "rates.launch_s cannot be"),
        (lambda: spoilt(on="yesterday"), "yesterday"),
        (lambda: spoilt(machine={**asdict(FOUND.machine), "memory_bytes": 10**400}), "machine.memory_bytes cannot be"),
        (lambda: spoilt(machine={**asdict(FOUND.machine), "nodes": 0}), "machine.nodes cannot be 0"),
        (lambda: spoilt(machine={**asdict(FOUND.machine), "card": "H200\x1b[31m"}), "machine.card cannot be"),
        (lambda: spoilt(rates={"memory": float("nan")}), "NaN is no number"),
        (lambda: spoilt(machine={"card": "H200"}), "machine.vendor is missing"),
        (lambda: "[]", "it cannot be"),
        (lambda: "\xff", "it is torn, or no JSON"),
    ],
)
def test_a_file_that_is_torn_or_another_s_is_named_and_not_used(text: Any, why: str, tmp_path: Path) -> None:
    path = place_of(EIGHT)
    path.parent.mkdir(parents=True)
    path.write_text(text(), encoding="utf-8")
    with pytest.raises(HardwareError, match=why) as caught:
        read_measured(path)
    assert caught.value.said.id == "measure.not-ours"
    measured, said = find_measured(EIGHT)
    assert measured is None
    assert ids(said) == ["measure.file-unused"]


def test_gpus_that_were_hidden_from_it_share_what_nobody_measured() -> None:
    rates = {"products.bf16": 7e14, "host_link": 5e10, "host_link_together": 5e10, "link": 3e11}
    write_measured(place_of(EIGHT), replace(FOUND, machine=replace(FOUND.machine, gpus_per_node=2), rates=rates))
    measured, said = find_measured(EIGHT, gpus=8)
    assert measured is not None
    assert set(measured.rates) == {"products.bf16", "host_link"}
    assert "Only 2 of the 8 GPUs were visible" in str(said[1])
    measured, _ = find_measured(EIGHT, gpus=2)
    assert measured is not None
    assert measured.rates == rates


def test_this_machine_uses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fingerprint_of(look())
    assert this_machine().measured is None
    write_measured(place_of(here), replace(FOUND, fingerprint=here, marked=()))
    hardware = this_machine()
    assert hardware.measured is not None
    assert hardware.measured.rates["memory"] == 3e12
    assert "measure.here" in [said.id for said in hardware.because if isinstance(said, Message)]


def test_a_file_names_its_machine(tmp_path: Path) -> None:
    write_measured(tmp_path / "cluster.json", FOUND)
    hardware = read_hardware(str(tmp_path / "cluster.json"))
    assert (hardware.gpu.name, hardware.gpu.arch, hardware.world) == ("H200", "sm_90", 8)
    assert hardware.gpu.bf16_flops is not None
    assert hardware.host_ram_bytes == 2015 * 2**30
    assert hardware.measured == FOUND.measured
    assert read_hardware(str(tmp_path / "cluster.json"), host_ram="64GB").host_ram_bytes == 64 * 2**30


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"there is no file clustre\.json"):
        read_hardware("clustre.json")
    with pytest.raises(HardwareError, match="We know no card 'some/card'"):
        read_hardware("some/card")


def test_another_file_is_not_taken_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("model: tiny_llama\n", encoding="utf-8")
    with pytest.raises(HardwareError, match=r"job\.yaml is not a measurement"):
        read_hardware("job.yaml")
    with pytest.raises(HardwareError, match="is a directory"):
        read_hardware(str(tmp_path))


def test_the_driver_and_the_processor_are_the_kernel_s_words(tmp_path: Path) -> None:
    for name, text in {
        "sys/module/nvidia/version": "570.86.15\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R)  Xeon\n",
        "proc/meminfo": "MemTotal:       2113000000 kB\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = fingerprint_of(look(), tmp_path)
    assert (found.cpu, found.ram_gib, found.driver) == ("Intel(R) Xeon", 2015, None), "without a card no driver"
