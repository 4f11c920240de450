"""How often a checkpoint is written where nobody said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tightfit
from tightfit.job import Job, Saving
from tightfit.messages import id_of
from tightfit.planner.plan import Plan
from tightfit.planner.saving import is_open, round_steps

LARGE = {"model": "qwen2.5-32b", "method": "lora", "gpus": "128x8xH100", "network": "8x400Gb", "engine": "fsdp2"}
LARGE |= {"micro_batch": 4, "compile": "layers", "checkpointing": "full"}


def planned(**flags: Any) -> Plan:
    return tightfit.plan(**LARGE | flags).plan


def said(plan: Plan) -> list[str]:
    return [found for each in plan.because if (found := id_of(each)) and found.startswith("plan.saves-")]


def test_many_gpus_save_more_often() -> None:
    plan = planned()
    assert plan.checkpoints is not None
    assert plan.checkpoints.lost_share is not None
    assert said(plan) == ["plan.saves-chosen"]
    assert plan.job.saving.every_steps == plan.checkpoints.best_steps < 500
    assert plan.checkpoints.lost_share == plan.checkpoints.best_lost_share < 0.03


def test_what_the_user_said_stays() -> None:
    plan = planned(save_steps=500)
    assert said(plan) == ["plan.saves-otherwise"]
    assert plan.job.saving.every_steps == 500


def test_a_small_machine_keeps_the_usual_interval_and_says_nothing() -> None:
    plan = tightfit.plan(model="llama-3.1-8b", gpus="8xH100", engine="fsdp2").plan
    assert plan.job.saving == Saving()
    assert plan.checkpoints is not None
    assert not said(plan)


def test_the_choice_changes_nothing_but_the_interval() -> None:
    free, kept = planned(), planned(save_steps=500)
    assert free.chosen == kept.chosen
    assert replace(free.job, saving=kept.job.saving) == kept.job


@pytest.mark.parametrize(
    ("explicit", "saving", "ours"),
    [
        (frozenset[str](), Saving(), True),
        (frozenset({"saving.every_steps"}), Saving(), False),
        (frozenset({"saving.every"}), Saving(every_steps=None, every_minutes=10), False),
        (frozenset[str](), Saving(keep_every=1000), False),
    ],
)
def test_it_is_ours_to_choose_where_nobody_said(explicit: frozenset[str], saving: Saving, ours: bool) -> None:
    assert is_open(explicit, Job(model="tiny_llama", saving=saving)) is ours


@pytest.mark.parametrize(("steps", "rounded"), [(0.2, 1), (37.6, 38), (336.4, 340), (4712, 4700)])
def test_steps_are_rounded_to_two_digits(steps: float, rounded: int) -> None:
    assert round_steps(steps) == rounded
