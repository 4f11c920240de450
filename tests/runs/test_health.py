"""Lights and warnings, from what a run's events have shown."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from recorded_attempts import PLANNED

from tightfit.runs.events import Step, event_of
from tightfit.runs.health import Health, Held, Seen, growth, judge_health

GIB, MIB = 2**30, 2**20
CARD = Held(name="GPU 0", used_bytes=10 * GIB, total_bytes=24 * GIB)
HOST = Held(name="host RAM", used_bytes=20 * GIB, total_bytes=64 * GIB)


def steps(count: int, of: Callable[[int], dict[str, object]], last: int = 1000) -> list[Step]:
    """As a worker writes them down."""
    made = []
    for number in range(1, count + 1):
        memory = {"now_bytes": 4 * GIB, "peak_bytes": 8 * GIB, "host_bytes": GIB}
        line = {"event": "step", "step": number, "steps": last, "loss": 5 - number / 100, "memory": memory}
        said = of(number)
        memory.update(said.pop("memory", {}))  # type: ignore[call-overload]
        event = event_of(json.dumps({**line, **said}))
        assert isinstance(event, Step)
        made.append(event)
    return made


def health(made: list[Step], **more: object) -> Health:
    values: dict[str, object] = {"memories": (CARD,), "own": (CARD,), "host": HOST, "worker": PLANNED, "has_run": True}
    return judge_health(Seen(**{**values, "steps": made, **more}))  # type: ignore[arg-type]


def colours(found: Health) -> list[str]:
    return [light.colour for light in found.lights]


def test_a_healthy_run_is_green_and_warns_of_nothing() -> None:
    found = health(steps(100, lambda n: {}))
    assert colours(found) == ["green", "green", "green"]
    assert found.warnings == ()


def test_nothing_known_is_not_green() -> None:
    unknown = Held(name="GPU 0", used_bytes=None, total_bytes=24 * GIB)
    found = judge_health(Seen(memories=(unknown,), host=Held(name="host RAM", used_bytes=None, total_bytes=None)))
    assert colours(found) == ["unknown"] * 3
    assert found.warnings == ()


@pytest.mark.parametrize(("used", "colour"), [(21.5, "green"), (21.7, "yellow"), (23.5, "red")])
def test_the_memory_light(used: float, colour: str) -> None:
    card = Held(name="GPU 3", used_bytes=int(used * GIB), total_bytes=24 * GIB)
    light = health([], memories=(CARD, card)).lights[0]
    assert light.colour == colour
    assert str(light.text).endswith("% of GPU 3")


def test_a_full_card_is_a_warning_and_a_full_cache_is_not() -> None:
    card = Held(name="GPU 0", used_bytes=int(23.8 * GIB), total_bytes=24 * GIB)
    others = health(steps(20, lambda n: {}), memories=(card,), own=())
    assert tuple(map(str, others.warnings)) == ("GPU 0 has 204.8 MiB of 24.00 GiB left: a longer batch may not fit",)
    assert health(steps(20, lambda n: {}), memories=(card,), own=(card,)).warnings == ()
    tight = steps(20, lambda n: {"memory": {"peak_bytes": int(22.8 * GIB)}})
    found = health(tight, memories=(card,), own=(card,))
    assert str(found.warnings[0]).startswith("GPU 0 has 204.8 MiB")
    assert "above the plan's 9.00 GiB" in str(found.warnings[1])


def test_memory_that_grows_from_step_to_step() -> None:
    leak = steps(60, lambda n: {"memory": {"now_bytes": 4 * GIB + n * 50 * MIB, "peak_bytes": 8 * GIB + n * 50 * MIB}})
    (warning,) = [said for said in map(str, health(leak).warnings) if "grows" in said]
    assert warning.startswith("GPU memory grows by 50.0 MiB per step, and fills the card at about step ")
    full = int(warning.split("step ")[-1].split(" of")[0])
    assert abs(full - (24 - 9) * 1024 / 50) < 5


def test_growth_that_ends_before_the_memory_does_is_no_news() -> None:
    slow = steps(60, lambda n: {"memory": {"now_bytes": 4 * GIB + n * 50 * MIB}}, last=70)
    assert health(slow).warnings == ()


def test_noise_is_no_growth() -> None:
    dice = random.Random(0)  # noqa: S311
    for _ in range(200):
        values = [(step, 4 * GIB + dice.randrange(300 * MIB)) for step in range(200)]
        assert growth(values, GIB, 32 * MIB) is None


def test_a_first_rise_that_stays_is_no_growth() -> None:
    values = [(step, 4 * GIB if step < 10 else 5 * GIB) for step in range(100)]
    assert growth(values, GIB, 32 * MIB) is None


def test_ranks_that_eat_the_host() -> None:
    found = health(steps(60, lambda n: {"memory": {"host_bytes": GIB + n * 400 * MIB}}))
    assert str(found.warnings[0]).startswith(
        "the ranks' host memory grows by 400.0 MiB per step, and fills the RAM at about"
    )


def test_host_ram_running_out_under_offload() -> None:
    low = Held(name="host RAM", used_bytes=60 * GIB, total_bytes=64 * GIB)
    found = health([], host=low, worker=replace(PLANNED, offload_optimizer="cpu"))
    said = "host RAM is running out: 4.00 GiB of 64.00 GiB left, and the offloaded states live there"
    assert tuple(map(str, found.warnings)) == (said,)
    falling = tuple((float(second), int((44 - second / 5) * GIB)) for second in range(150))
    found = health([], host_free=falling)
    assert str(found.warnings[0]).startswith("host RAM is running out: at this pace the 44.00 GiB left last 1 min")
    assert health([], host_free=falling[:100]).warnings == (), "what starts takes much at once"


@pytest.mark.parametrize(
    ("scales", "warns"),
    [
        ([65536.0] * 20, False),
        ([65536.0, 32768.0, 16384.0] + [16384.0] * 20, False),  # the first ones look for the right scale
        ([65536.0] * 5 + [32768.0, 16384.0, 8192.0, 4096.0], True),
        ([65536.0, 32768.0, 16384.0, 8192.0, 16384.0], False),
    ],
)
def test_a_loss_scale_that_falls(scales: list[float], warns: bool) -> None:
    found = health(steps(len(scales), lambda n: {"loss_scale": scales[n - 1]}))
    assert bool(found.warnings) == warns
    if warns:
        assert str(found.warnings[0]).startswith(
            "the loss scale fell 4 times in a row, from 65,536 to 4,096 since step 5"
        )


@pytest.mark.parametrize(
    ("loss", "colour", "words"),
    [
        (lambda n: 5 - n / 100, "green", "→"),
        (lambda n: 5.0, "yellow", "flat"),
        (lambda n: 5 + n / 50, "yellow", "rising"),
        (lambda n: 2 + n / 10, "red", "rising"),
        (lambda n: 0.0, "red", "exactly 0"),
        (lambda n: None if n > 90 else 5.0, "red", "since step 91"),
    ],
)
def test_the_loss_light(loss: Callable[[int], float | None], colour: str, words: str) -> None:
    light = health(steps(100, lambda n: {"loss": loss(n)})).lights[1]
    assert light.colour == colour
    assert words in str(light.text)


def test_a_skipped_step_says_nothing_about_the_loss() -> None:
    found = health(steps(50, lambda n: {"loss": None, "skipped": True} if n % 5 == 0 else {}))
    assert found.lights[1].colour == "green"


def test_too_few_steps_say_nothing() -> None:
    assert health(steps(3, lambda n: {})).lights[1].colour == "unknown"


def test_memory_that_ran_out() -> None:
    assert health([], oom="CUDA out of memory").lights[2].colour == "yellow"
    assert health([], oom="CUDA out of memory", oom_is_last=True).lights[2].colour == "red"


def test_retries_of_the_allocator_are_told_while_they_go_on() -> None:
    found = health(steps(100, lambda n: {"alloc_retries": 3 + max(0, n - 90) // 2}))
    assert tuple(map(str, found.warnings)) == (
        "the allocator had to free its cache and retry 5 times in the last 50 steps: memory is within the margin",
    )
    once = health(steps(2, lambda n: {"alloc_retries": n - 1}))
    assert tuple(map(str, once.warnings)) == (
        "the allocator had to free its cache and retry once in the last step: memory is within the margin",
    )


def test_retries_that_are_over_or_not_told_are_no_news() -> None:
    assert health(steps(100, lambda n: {"alloc_retries": 3})).warnings == ()
    assert health(steps(100, lambda n: {})).warnings == ()  # of an older run, or of the CPU
    assert health(steps(100, lambda n: {"alloc_retries": "many"})).warnings == ()
    assert steps(1, lambda n: {})[0].alloc_retries is None


@pytest.mark.parametrize(
    ("said", "seen", "why"),
    [
        ({"tokens": 500}, {}, "a step has 500 tokens where 8,000 were planned"),
        ({}, {"own": (replace(CARD, others=2, use_percent=97.0),)}, "2 other processes are on GPU 0 as well"),
        ({}, {"own": (replace(CARD, use_percent=7.0),)}, "GPU 0 is busy for 7 % of the time only"),
        ({}, {"load_per_core": 3.5}, "3.5 processes want each core"),
        ({"step_s": 100.0}, {}, "a step takes 1 min 40 s where 2 s was planned"),
        ({}, {}, "nothing that can be seen from here explains it"),
    ],
)
def test_a_slow_run_says_so_and_why(said: dict[str, object], seen: dict[str, object], why: str) -> None:
    planned = replace(PLANNED, tokens_per_s=4000.0, step_s=2.0)
    made = steps(40, lambda n: {"tokens_per_s": 80.0, **said})
    found = health(made, worker=planned, **seen)
    assert found.pace is not None
    assert found.pace.share == pytest.approx(0.02)
    (warning,) = (str(each) for each in found.warnings)
    assert warning.startswith("2 % of the planned pace: 80 of 4,000 tokens per second. Why: ")
    assert why in warning


def test_a_run_as_fast_as_planned_is_no_news() -> None:
    planned = replace(PLANNED, tokens_per_s=4000.0, step_s=2.0)
    found = health(steps(40, lambda n: {"tokens_per_s": 3600.0, "tokens": 8000}), worker=planned)
    assert found.pace is not None
    assert (found.pace.share, found.warnings) == (pytest.approx(0.9), ())
    assert health(steps(40, lambda n: {"tokens_per_s": 80.0}), worker=replace(planned, tokens_per_s=None)).pace is None


def test_a_light_says_what_is_so() -> None:
    well, broken = health(steps(100, lambda n: {})), health(steps(100, lambda n: {"loss": 2.0}), oom="The GPU is full.")
    assert [str(light.title) for light in well.lights] == [
        "memory under 90 %",
        "loss falling",
        "no out-of-memory error seen",
    ]
    titles = [str(light.title) for light in broken.lights]
    assert titles[1:] == ["loss not falling", "ran out of memory earlier, and went on"]
