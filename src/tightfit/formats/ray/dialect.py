"""Ray Train, which starts a plan's worker on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Collection

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.ray.write import ray_train
from tightfit.formats.target import Target
from tightfit.messages import Message
from tightfit.planner.plan import Plan


def write_ray_train(plan: Plan, target: Target, files: Collection[str]) -> str | None:
    return ray_train(plan, target) if target.cluster == "ray" else None


DIALECT = Dialect(
    name="ray",
    files=(
        PlanFile(
            name="ray_train.py",
            what=Message("ray.file"),
            write=write_ray_train,
            version=lambda plan, target: "Ray 2.60",
        ),
    ),
)
