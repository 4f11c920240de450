"""`estimate` and `plan` are two doors to one model: asked for what a plan chose, an estimate gives the plan's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tightfit
from tightfit.desk.plan import answered
from tightfit.desk.request import read_request
from tightfit.inputs.flags import flags_from_levers
from tightfit.model.presets import PRESETS
from tightfit.planner.plan import Plan, Way
from tightfit.priced import Priced

THE_MACHINES = ("precision", "deepspeed_version")
"""Where nobody says it, the machine decides."""
MACHINES = ("1x24GB", "2x8xA100-80GB", "4xRTX2080Ti", "8xK100-64GB", "8xMI300X")
TURNS = {f"some on {gpus}": (gpus, tuple(PRESETS)[number :: len(MACHINES)]) for number, gpus in enumerate(MACHINES)}
"""Every machine and every model."""
ALL = [pytest.param(gpus, tuple(PRESETS), id=f"all on {gpus}", marks=pytest.mark.slow) for gpus in MACHINES]


@pytest.mark.thorough
@pytest.mark.parametrize(("gpus", "models"), [*(pytest.param(*turn, id=name) for name, turn in TURNS.items()), *ALL])
def test_what_a_plan_chose_is_estimated_as_the_plan_says(gpus: str, models: tuple[str, ...]) -> None:
    compared = 0
    for model in models:
        machine = {"model": model, "gpus": gpus, "host_ram": "512GB"}
        answer, _ = answered(read_request(machine | {"no_calibration": True}), advice=False)
        assert isinstance(answer, Plan)
        chosen = answer.chosen
        if chosen is None:
            continue
        said = {flag: value for flag, value in flags_from_levers(chosen.levers).items() if flag not in THE_MACHINES}
        priced = tightfit.estimate(**machine, world=chosen.world, **said).priced
        assert priced.levers == chosen.levers, model
        assert (priced.footprint.gpu, priced.footprint.host) == (chosen.footprint.gpu, chosen.footprint.host), model
        compared += 1
    assert compared >= len(models) // 3, "or this shows little"


ON_NVME = {"engine": "stream", "offload_optimizer": "nvme"}


def plan_and_estimate(machine: dict[str, Any], asked: dict[str, Any]) -> tuple[Way, Priced]:
    """What a plan chose, and an estimate of its question. An estimate of what was chosen has the plan's bytes."""
    answer, _ = answered(read_request(machine | asked | {"no_calibration": True}), advice=False)
    assert isinstance(answer, Plan)
    assert answer.chosen is not None
    chosen = answer.chosen
    said = {flag: value for flag, value in flags_from_levers(chosen.levers).items() if flag not in THE_MACHINES}
    priced = tightfit.estimate(**machine, **said).priced
    assert priced.levers == chosen.levers
    assert (priced.footprint.gpu, priced.footprint.host) == (chosen.footprint.gpu, chosen.footprint.host)
    return chosen, tightfit.estimate(**machine, **asked).priced


@pytest.mark.parametrize("host_ram", ["60GB", "128GB"])
def test_of_states_on_an_nvme_as_many_stay_in_ram_as_in_a_plan(host_ram: str) -> None:
    machine = {"model": "llama-3.1-8b", "gpus": "1xRTX4090", "host_ram": host_ram, "nvme": "1TB"}
    chosen, plain = plan_and_estimate(machine, ON_NVME)
    assert plain.fits
    assert plain.footprint.host == chosen.footprint.host
    on_nvme = f"NVMe: {chosen.footprint.host.nvme_bytes_per_node / 2**30:.1f} of 1024.0 GiB per node."
    assert on_nvme in str(tightfit.estimate(**machine, **ON_NVME))


@pytest.mark.parametrize(
    "asked",
    [
        {"reduce_bucket": 1_000_000},  # which no layer that streams has
        {"checkpointing": "full+offload", "accum": 16},  # what waits fits in the tenth that states leave
        {"checkpointing": "full+offload", "accum": 64},  # and here takes more
        {"frozen_layers": 8, "seq": 512},  # an estimate has frozen layers on the card, a plan in RAM
    ],
    ids=["buckets", "inputs wait", "many inputs wait", "frozen"],
)
def test_whatever_else_is_asked_of_states_on_an_nvme(asked: dict[str, Any]) -> None:
    machine = {"model": "llama-3.1-8b", "gpus": "1xRTX4090", "host_ram": "96GB", "nvme": "1TB"}
    chosen, plain = plan_and_estimate(machine, {**ON_NVME, **asked})
    assert plain.levers.buckets == chosen.levers.buckets
    assert plain.footprint.host.nvme_bytes_per_node == chosen.footprint.host.nvme_bytes_per_node


def deepspeed_installed(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    info = folder / f"deepspeed-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("machine", [{"gpus": "8x80GB"}, {"world": 8}])
def test_the_installed_deepspeed_is_estimated(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": "qwen2.5-7b", "engine": "zero2", **machine}
    newest = tightfit.estimate(**asked).footprint.gpu.init_peak_bytes
    deepspeed_installed(tmp_path, monkeypatch, "0.16.4")
    estimated = tightfit.estimate(**asked)
    assert estimated.priced.levers.deepspeed_version == "0.16.4"
    assert estimated.footprint.gpu.init_peak_bytes < newest
    assert any("DeepSpeed 0.16.4, which is installed here" in sentence for sentence in map(str, estimated.priced.said))
    assert tightfit.estimate(**asked, deepspeed_version="0.19.8").footprint.gpu.init_peak_bytes == newest


@pytest.mark.parametrize("engine", ["", "levers: {engine: zero2}\n"])
def test_a_job_file_on_hygons_cards_is_estimated_for_their_deepspeed(engine: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: qwen1.5-1.8b\nhardware: {{gpus: 8xK100-64GB}}\n{engine}")
    assert tightfit.estimate(job).priced.levers.deepspeed_version == "0.14.2"


def test_a_deepspeed_json_is_read_as_the_machines_deepspeed_reads_it(tmp_path: Path) -> None:
    """Host memory is pinned by default since 0.19.5; Hygon's is older."""
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    asked = {"model": "qwen1.5-1.8b", "deepspeed": str(config)}
    on_hygon = tightfit.estimate(**asked, gpus="8xK100-64GB").priced.levers
    assert (on_hygon.deepspeed_version, on_hygon.buckets.pin_memory) == ("0.14.2", False)
    assert tightfit.estimate(**asked, gpus="8xA100-80GB").priced.levers.buckets.pin_memory
