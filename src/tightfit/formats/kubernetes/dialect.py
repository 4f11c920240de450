"""Kubernetes, which starts a plan in three ways: its own Job, and Kubeflow's TrainJob and PyTorchJob."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tightfit.formats.dialect import Dialect, PlanFile
from tightfit.formats.kubernetes.write import indexed_job, paths_notes, pytorch_job, train_job
from tightfit.formats.target import Target
from tightfit.messages import Message
from tightfit.planner.plan import Plan


def where_asked(
    write: Callable[[Plan, Target], str],
) -> Callable[[Plan, Target, Collection[str]], str | None]:
    """The same, for plans that are to start on Kubernetes."""
    return lambda plan, target, _: write(plan, target) if target.cluster == "kubernetes" else None


DIALECT = Dialect(
    name="kubernetes",
    files=(
        PlanFile(
            name="kubernetes-job.yaml",
            what=Message("kubernetes.job-file"),
            write=where_asked(indexed_job),
            notes=paths_notes,
            version=lambda plan, target: Message("kubernetes.job-version"),
        ),
        PlanFile(
            name="kubeflow-trainjob.yaml",
            what=Message("kubernetes.trainjob-file"),
            write=where_asked(train_job),
            version=lambda plan, target: "Kubeflow Trainer 2.3",
        ),
        PlanFile(
            name="kubeflow-pytorchjob.yaml",
            what=Message("kubernetes.pytorchjob-file"),
            write=where_asked(pytorch_job),
            version=lambda plan, target: "Kubeflow Training Operator 1.9",
        ),
    ),
)
