"""Manifests that start a plan under Kubernetes, one pod a node.

A pod runs the plan's own `launch.sh`, so variables, checks and the line of torchrun stand in one place; a manifest adds
what only the cluster knows: the number of the pod and the name of pod 0. The folder of the plan lies on a claim, and
so does what a run writes, since the folder of a run is counted from there unless its path is absolute.

Who starts it again? Not tightfit's supervisor, which watches the processes of one machine: a pod that is gone takes
it along. The cluster does, a bounded number of times, and the worker goes on from its newest checkpoint by itself.
A pod that leaves takes the ranks of the others with it, so that each failure costs every pod one restart.

Kubernetes sends SIGTERM first and kills after the grace period. Torchrun hands the signal on to the ranks, which save
at the end of their step; how long it waits for them is told by a variable in `launch.sh`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from tightfit.formats.launch.script import comment
from tightfit.formats.target import Target
from tightfit.formats.worker.write import require_way, time_to_save_s, untrained
from tightfit.messages import Listing, Message, Said
from tightfit.planner.plan import Plan
from tightfit.priced import GIB, strategy_name
from tightfit.types import Vendor

NAME = "tightfit"
IMAGE, NAMESPACE, CLAIM, RUNS_CLAIM = "registry.example.com/tightfit:latest", "default", "tightfit", "tightfit-runs"
"""What the user replaces: the image, the namespace, the claim with the plan, and one for a run elsewhere."""
FOLDER = "/plan"  # where the claim with the plan is mounted
PLACEHOLDERS = {"image": IMAGE, "namespace": NAMESPACE, "claim": CLAIM, "folder": FOLDER}  # as messages name them
RESTARTS = 3

RESOURCES: Mapping[Vendor, str] = {
    "nvidia": "nvidia.com/gpu",
    "unknown": "nvidia.com/gpu",  # a card given by its size is taken to be NVIDIA's, as in `launch.sh`
    "amd": "amd.com/gpu",
    "hygon": "hygon.com/dcu",
}
"""What the vendors' device plugins call a GPU."""

Tree = dict[str, Any]


def indexed_job(plan: Plan, target: Target) -> str:
    """A Job of Kubernetes itself, one index a node, and the headless Service that gives pod 0 a name."""
    nodes = require_way(plan).hardware.nodes
    labels = {"app.kubernetes.io/name": NAME}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            _note("kubernetes.headless"): None,
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": NAME},
            "ports": [{"name": "rendezvous", "port": target.port}],
        },
    }
    container = _container(plan, NAME, 'NODE_RANK="$JOB_COMPLETION_INDEX"')
    container["env"] = [
        {"name": "MASTER_ADDR", "value": f"{NAME}-0.{NAME}"},
        {"name": "MASTER_PORT", "value": str(target.port)},
    ]
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            _note("kubernetes.restarts"): None,
            "backoffLimit": RESTARTS * nodes,
            _note("kubernetes.failure-policy"): None,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"subdomain": NAME, "restartPolicy": "Never", **_pod(plan, container)},
            },
        },
    }
    return _manifest(plan, "kubernetes-job.yaml", service, job)


def train_job(plan: Plan, target: Target) -> str:
    """Kubeflow Trainer's TrainJob, over the runtime that it brings for torch."""
    hardware = require_way(plan).hardware
    told = 'NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"'
    container = _container(plan, "node", told)
    pod = _pod(plan, {"name": "node", "volumeMounts": container["volumeMounts"]})
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            _note("kubernetes.runtime-restarts"): None,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": IMAGE,
                "command": container["command"],
                "numNodes": hardware.nodes,
                "numProcPerNode": hardware.gpus_per_node,
                "resourcesPerNode": container["resources"],
            },
            _note("kubernetes.runtime-patches"): None,
            "runtimePatches": [
                {
                    "manager": "tightfit/plan",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
                            }
                        }
                    },
                }
            ],
        },
    }
    return _manifest(plan, "kubeflow-trainjob.yaml", job)


def pytorch_job(plan: Plan, target: Target) -> str:
    """The PyTorchJob of Kubeflow's Training Operator: a master, and a worker for each further node."""
    hardware = require_way(plan).hardware
    container = _container(plan, "pytorch", 'NODE_RANK="$RANK"')
    container["ports"] = [{"name": "pytorchjob-port", "containerPort": target.port}]
    replica = {"restartPolicy": "OnFailure", "template": {"spec": _pod(plan, container)}}
    replicas: Tree = {_note("kubernetes.operator-restarts"): None, "Master": {"replicas": 1, **replica}}
    if hardware.nodes > 1:
        replicas["Worker"] = {"replicas": hardware.nodes - 1, **replica}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "nprocPerNode": str(hardware.gpus_per_node),
            "runPolicy": {"backoffLimit": RESTARTS * hardware.nodes, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return _manifest(plan, "kubeflow-pytorchjob.yaml", job)


def _container(plan: Plan, name: str, told: str) -> Tree:
    """`told`: what the cluster knows of a pod, as variables of `launch.sh`."""
    way = require_way(plan)
    hardware, memory = way.hardware, math.ceil(way.footprint.host.peak_bytes_per_node / GIB)
    resources: Tree = {_note("kubernetes.memory"): None, "requests": {"memory": f"{memory}Gi"}}
    if (gpu := RESOURCES.get(hardware.gpu.vendor)) is not None:
        named = {_note("kubernetes.dcu"): None} if hardware.gpu.vendor == "hygon" else {}
        resources |= {"limits": {**named, gpu: hardware.gpus_per_node}}
    return {
        "name": name,
        "image": IMAGE,
        "command": ["bash", "-c", f"{told} exec bash {FOLDER}/launch.sh"],
        "resources": resources,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _volumes(plan)],
    }


def _pod(plan: Plan, container: Tree) -> Tree:
    return {
        _note("kubernetes.grace"): None,
        "terminationGracePeriodSeconds": time_to_save_s(plan),
        "containers": [container],
        "volumes": [{"name": name, **source} for name, _, source in _volumes(plan)],
    }


def _volumes(plan: Plan) -> list[tuple[str, str, Tree]]:
    """Each with its name, its place in the pod, and what it is."""
    way, runs, nvme = require_way(plan), plan.job.saving.folder, plan.job.hardware.nvme_path
    claimed: Tree = {_note("kubernetes.claim"): None, "persistentVolumeClaim": {"claimName": CLAIM}}
    shared: Tree = {_note("kubernetes.shm"): None, "emptyDir": {"medium": "Memory"}}
    volumes = [("plan", FOLDER, claimed), ("shm", "/dev/shm", shared)]  # noqa: S108
    if runs.startswith("/"):
        volumes.append(("runs", runs, {"persistentVolumeClaim": {"claimName": RUNS_CLAIM}}))
    if nvme is not None and "nvme" in (way.levers.offload_optimizer, way.levers.offload_param):
        volumes.append(("nvme", nvme, {"hostPath": {"path": nvme, "type": "DirectoryOrCreate"}}))
    return volumes


def paths_notes(plan: Plan, target: Target) -> tuple[Said, ...]:
    """What of this machine the plan names, and no pod has unless it is mounted there."""
    job = plan.job
    named = (job.model, job.data.path, job.data.tokenizer, job.data.template, job.data.recipe)
    paths = dict.fromkeys(path for path in named if isinstance(path, str) and path.startswith("/"))
    return (Message("kubernetes.paths", paths=Listing(paths, "and"), folder=FOLDER),) if paths else ()


# --- YAML with comments ---------------------------------------------------------------------------


def _note(id: str) -> str:  # noqa: A002
    """A key that becomes a comment above the next one: the message of this id."""
    return f"#{id}"


def _manifest(plan: Plan, name: str, *trees: Tree) -> str:
    way = require_way(plan)
    fields = {"strategy": strategy_name(way.levers), "world": way.world, "gpu": way.hardware.gpu.name, "name": name}
    said: list[Said] = [Message("kubernetes.starts", **fields)]
    said += [Message("kubernetes.replace", **PLACEHOLDERS)]
    said += [*paths_notes(plan, Target()), *untrained(plan.job)]
    head = "".join(f"{line}\n" for each in said for line in comment(each))
    return head + "---\n".join(map(_dump, trees))


def _dump(tree: Tree) -> str:
    plain = yaml.dump(tree, Dumper=_Whole, sort_keys=False, allow_unicode=True, width=10**6)
    lines: list[str] = []
    for line in plain.splitlines():
        found = re.fullmatch(r"( *)'#(.*)': null", line)
        if found is None:
            lines.append(line)
        else:
            lines += [found[1] + part for part in comment(Message(found[2], count=RESTARTS))]
    return "\n".join(lines) + "\n"


class _Whole(yaml.SafeDumper):
    """Writes what occurs twice twice: nobody reads `&id001`."""

    def ignore_aliases(self, data: object) -> bool:
        return True
