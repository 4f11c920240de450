"""Compressed messages on paper: what they hold, what they send, and where a plan offers or takes them."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit import memory
from tightfit.hardware.named import read_hardware
from tightfit.hardware.words import connect
from tightfit.inputs.flags import levers_from_flags
from tightfit.job.file import job_from_flags
from tightfit.memory.compressed import gradient_messages
from tightfit.model.load import load_model
from tightfit.pace import pace
from tightfit.planner import plan
from tightfit.types import Hardware, Levers

SHAPE = load_model("qwen1.5-0.5b")
SMALLER = {"powersgd": 40, "onebit": 10}
"""So many times less waits for a slow network."""


def levers(**flags: Any) -> Levers:
    return levers_from_flags({"engine": "ddp", "seq": 512, **flags}, SHAPE)


def nodes(network: str) -> Hardware:
    return connect(read_hardware("2x8xA100-80GB", host_ram="512GB"), network, None)


@pytest.mark.parametrize("compress", SMALLER)
def test_what_is_left_out_is_kept_in_fp32_and_far_less_is_sent(compress: str) -> None:
    exact, less = levers(), levers(compress=compress)
    hardware = nodes("10Gb")
    more = memory.estimate(SHAPE, less, 16, hardware).gpu.peak_bytes
    more -= memory.estimate(SHAPE, exact, 16, hardware).gpu.peak_bytes
    assert 0.9 * 4 * SHAPE.parameters < more < 1.3 * 4 * SHAPE.parameters
    waits = [pace(SHAPE, each, hardware).causes["communication"] for each in (exact, less)]
    assert waits[0] > SMALLER[compress] * waits[1]
    assert gradient_messages(SHAPE, less, 16).sent < 8 * SHAPE.parameters / SMALLER[compress]


def test_zeropp_sends_a_half_of_the_weights_and_a_quarter_of_the_gradients() -> None:
    hardware = nodes("1Gb")  # so slow that nothing else counts
    exact, less = (pace(SHAPE, levers(engine="zero3", compress=each), hardware).step_s for each in ("none", "zeropp"))
    assert less / exact == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3, rel=0.1)


def test_a_plan_is_never_compressed_unasked_and_offers_it_where_it_mostly_waits() -> None:
    flags = {"model": "qwen1.5-0.5b", "seq": 512, "effective_batch": 64}
    slow, fast = nodes("1Gb"), nodes("8x400Gb")
    offered = plan(job_from_flags(flags), SHAPE, slow, every_gpu=True)
    assert offered.chosen is not None
    assert {way.levers.compress for way in (offered.chosen, *offered.alternatives)} == {"none"}
    (remedy,) = offered.remedies
    assert remedy.allowance == "compress"
    assert remedy.way.pace.step_s < offered.chosen.pace.step_s / 2
    assert any("--allow compress would shorten a step" in str(each) for each in offered.because)
    taken = plan(job_from_flags({**flags, "allow": "compress"}), SHAPE, slow, every_gpu=True)
    assert taken.chosen is not None
    assert taken.chosen.levers == remedy.way.levers
    assert "sends less between GPUs" in str(taken.chosen.changes[0])
    idle = plan(job_from_flags({**flags, "allow": "compress"}), SHAPE, fast, every_gpu=True)
    assert idle.chosen is not None
    assert (idle.chosen.levers.compress, idle.remedies) == ("none", ())


@pytest.mark.parametrize(("host_ram", "would_fit"), [("512GB", True), ("16GB", False)])
def test_where_compression_is_in_the_way_the_plan_says_so(host_ram: str, would_fit: bool) -> None:
    """Every GPU has everything then."""
    flags = {"model": "llama-3.1-8b", "seq": 512, "effective_batch": 8, "compress": "powersgd"}
    found = plan(job_from_flags(flags), load_model("llama-3.1-8b"), read_hardware("2x8GB", host_ram=host_ram))
    assert found.chosen is None
    said = "Without --compress powersgd there is a way that fits: leave it out."
    assert (said in map(str, found.because)) == would_fit


@pytest.mark.parametrize("compress", [*SMALLER, "zeropp"])
def test_the_search_and_the_pace_agree(compress: str) -> None:
    flags = {"model": "qwen1.5-0.5b", "seq": 512, "effective_batch": 64, "compress": compress}
    hardware = nodes("25Gb")
    found = plan(job_from_flags(flags), SHAPE, hardware).chosen
    assert found is not None
    assert found.levers.compress == compress
    assert found.pace.step_s == pytest.approx(pace(SHAPE, found.levers, found.hardware).step_s, rel=1e-9)
