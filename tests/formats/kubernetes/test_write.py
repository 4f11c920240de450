"""Each manifest is read as its cluster reads it: by the models that Kubeflow publishes, which hold Kubernetes' own too.

Those ignore a field that they do not know, and the API server does not: so all that went in must come back.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.formats.render import render
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Data, Job, Machine, Saving
from tightfit.messages import LANGUAGES, Language, speak
from tightfit.planner.plan import Plan
from tightfit.types import Levers

MakePlan = Callable[..., Plan]
Tree = dict[str, Any]

KUBERNETES = Target(cluster="kubernetes")
ZERO3 = Levers(engine="zero3", offload_optimizer="cpu")
MANIFESTS = ("kubernetes-job.yaml", "kubeflow-trainjob.yaml", "kubeflow-pytorchjob.yaml")


@pytest.fixture
def rendered(make_plan: MakePlan) -> Callable[..., dict[str, str]]:
    def render_for(gpus: str = "2x8xA100-80GB", levers: Levers = ZERO3, **job: Any) -> dict[str, str]:
        plan = make_plan(levers, parse_hardware(gpus), Job(**({"model": "qwen2.5-7b"} | job)))
        return render(plan, KUBERNETES)

    return render_for


def validate(tree: Tree) -> None:
    """A ValueError for a wrong type or a missing field, an AssertionError for one that the API does not know."""
    import kubeflow_trainer_api.models as models

    if tree["kind"] == "PyTorchJob":
        validate_pytorch_job(tree)
        return
    kinds = {
        "Service": models.IoK8sApiCoreV1Service,
        "Job": models.IoK8sApiBatchV1Job,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    read = kinds[tree["kind"]].from_dict(tree)
    assert read is not None
    check_kept(tree, json.loads(read.to_json()), tree["kind"])


def check_kept(written: Any, read: Any, place: str) -> None:
    """All that was written is there; what is there beside it are defaults."""
    if isinstance(written, dict):
        assert set(written) <= set(read), place
        for key, value in written.items():
            check_kept(value, read[key], f"{place}.{key}")
    elif isinstance(written, list):
        assert len(written) == len(read), place
        for number, (value, found) in enumerate(zip(written, read, strict=True)):
            check_kept(value, found, f"{place}.{number}")
    else:
        assert written == read, place


def validate_pytorch_job(tree: Tree) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a client that is no longer developed
        from kubeflow.training import models
    import kubeflow_trainer_api.models as trainer_models

    def check(value: Any, kind: str, place: str) -> None:
        if found := re.fullmatch(r"dict\(str, (.*)\)|list\[(.*)\]", kind):
            assert isinstance(value, dict if found[1] else list), place
            items = value.items() if found[1] else enumerate(value)
            for key, each in items:
                check(each, found[1] or found[2], f"{place}.{key}")
        elif kind == "V1PodTemplateSpec":
            read = trainer_models.IoK8sApiCoreV1PodTemplateSpec.from_dict(value)
            assert read is not None
            check_kept(value, json.loads(read.to_json()), place)
        elif hasattr(models, kind):
            types = getattr(models, kind).openapi_types
            names = {name: attribute for attribute, name in getattr(models, kind).attribute_map.items()}
            assert set(value) <= set(names), place
            for name, each in value.items():
                check(each, types[names[name]], f"{place}.{name}")
        elif kind != "V1ObjectMeta":
            assert type(value).__name__ == kind, place

    check(tree, "KubeflowOrgV1PyTorchJob", "")
    assert tree["apiVersion"] == "kubeflow.org/v1"


def trees_of(files: dict[str, str]) -> dict[str, Tree]:
    """Each object, by its kind."""
    found = [tree for name in MANIFESTS for tree in yaml.safe_load_all(files[name])]
    return {tree["kind"]: tree for tree in found}


def pods_of(trees: dict[str, Tree]) -> list[Tree]:
    """The spec of every pod that a manifest describes whole."""
    replicas = trees["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()
    return [each["template"]["spec"] for each in (trees["Job"]["spec"], *replicas)]


def containers_of(trees: dict[str, Tree]) -> list[Tree]:
    """What runs in every pod; a TrainJob says it in two places."""
    trainer = trees["TrainJob"]["spec"]["trainer"]
    whole = [container for pod in pods_of(trees) for container in pod["containers"]]
    return [*whole, {**trainer, "resources": trainer["resourcesPerNode"], **patch_of(trees)["containers"][0]}]


def patch_of(trees: dict[str, Tree]) -> Tree:
    (patch,) = trees["TrainJob"]["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod: Tree = job["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("gpus", ["1xRTX4090", "8xA100-80GB", "2x8xA100-80GB", "2x8xK100-64GB", "4x8xMI300X"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_manifest_is_what_its_api_takes(
    rendered: Callable[..., dict[str, str]], gpus: str, language: Language
) -> None:
    speak(language)
    try:
        files = rendered(gpus, data=Data(path="/data/a.jsonl"), saving=Saving(folder="/runs/one"))
    finally:
        speak("en")
    trees = trees_of(files)
    assert set(trees) == {"Service", "Job", "TrainJob", "PyTorchJob"}
    for tree in trees.values():
        validate(tree)


@pytest.mark.parametrize("kind", ["Service", "Job", "TrainJob", "PyTorchJob"])
def test_a_field_that_nobody_knows_is_found(rendered: Callable[..., dict[str, str]], kind: str) -> None:
    tree = trees_of(rendered())[kind]
    with pytest.raises(AssertionError):
        validate({**tree, "spec": {**tree["spec"], "retries": 3}})


def test_a_wrong_type_in_a_pod_is_found(rendered: Callable[..., dict[str, str]]) -> None:
    for kind in ("Job", "PyTorchJob"):
        trees = trees_of(rendered())
        for pod in pods_of(trees):
            pod["terminationGracePeriodSeconds"] = "long"
        with pytest.raises(ValueError, match="terminationGracePeriodSeconds"):
            validate(trees[kind])


@pytest.mark.parametrize(
    ("gpus", "resource"),
    [
        ("2x8xA100-80GB", {"nvidia.com/gpu": 8}),
        ("2x4x80GB", {"nvidia.com/gpu": 4}),
        ("2x8xMI300X", {"amd.com/gpu": 8}),
        ("2x8xK100-64GB", {"hygon.com/dcu": 8}),
    ],
)
def test_a_pod_gets_the_gpus_of_a_node(
    rendered: Callable[..., dict[str, str]], gpus: str, resource: dict[str, int]
) -> None:
    for container in containers_of(trees_of(rendered(gpus))):
        assert container["resources"]["limits"] == resource


def test_a_pod_gets_memory_and_shared_memory_and_time_to_save(make_plan: MakePlan) -> None:
    plan = make_plan(ZERO3, parse_hardware("2x8xA100-80GB"), Job(model="qwen2.5-7b"))
    trees = trees_of(render(plan, KUBERNETES))
    assert plan.chosen is not None
    need = plan.chosen.footprint.host.peak_bytes_per_node
    for container in containers_of(trees):
        asked = int(container["resources"]["requests"]["memory"].removesuffix("Gi")) << 30
        assert need <= asked < need + (1 << 30)
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]  # noqa: S108
    for pod in (*pods_of(trees), patch_of(trees)):
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert {"name": "plan", "persistentVolumeClaim": {"claimName": "tightfit"}} in pod["volumes"]
        assert pod["terminationGracePeriodSeconds"] >= 300


def test_a_run_folder_elsewhere_has_a_claim_of_its_own(rendered: Callable[..., dict[str, str]]) -> None:
    trees = trees_of(rendered(saving=Saving(folder="/runs/one")))
    for container in containers_of(trees):
        assert {"name": "runs", "mountPath": "/runs/one"} in container["volumeMounts"]
    assert "tightfit-runs" not in str(trees_of(rendered()))


def test_offload_to_nvme_finds_the_disk_of_the_node(rendered: Callable[..., dict[str, str]]) -> None:
    levers = replace(ZERO3, offload_optimizer="nvme")
    trees = trees_of(rendered(levers=levers, hardware=Machine(nvme_path="/nvme/swap")))
    for container in containers_of(trees):
        assert {"name": "nvme", "mountPath": "/nvme/swap"} in container["volumeMounts"]
    for tree in trees.values():
        validate(tree)


def test_paths_of_this_machine_are_named(rendered: Callable[..., dict[str, str]]) -> None:
    files = rendered(data=Data(path="/home/me/a.jsonl"))
    for name in (*MANIFESTS, "PLAN.md"):
        assert "/home/me/a.jsonl" in files[name]


def test_a_master_and_a_worker_for_each_further_node(rendered: Callable[..., dict[str, str]]) -> None:
    replicas = trees_of(rendered("4x8xA100-80GB"))["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 3}
    assert set(trees_of(rendered("8xA100-80GB"))["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]) == {"Master"}


def test_the_job_has_an_index_for_each_node_and_a_name_for_pod_0(rendered: Callable[..., dict[str, str]]) -> None:
    trees = trees_of(rendered())
    job, service = trees["Job"]["spec"], trees["Service"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": trees["Job"]["metadata"]["name"]}


TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > said
env > told
"""


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("Job", {"JOB_COMPLETION_INDEX": "1"}),
        ("TrainJob", {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "tightfit-node-0-0", "PET_MASTER_PORT": "29400"}),
        ("PyTorchJob", {"RANK": "1", "MASTER_ADDR": "tightfit-master-0", "MASTER_PORT": "29500"}),
    ],
)
def test_the_command_of_a_pod_starts_torchrun_as_its_node(
    rendered: Callable[..., dict[str, str]], tmp_path: Path, kind: str, told: dict[str, str]
) -> None:
    files = rendered()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(TORCHRUN, encoding="utf-8")
    (programs / "torchrun").chmod(0o755)
    trees = trees_of(files)
    container = dict(zip(("Job", "PyTorchJob", "", "TrainJob"), containers_of(trees), strict=True))[kind]
    env = {each["name"]: each["value"] for each in container.get("env", ())} | told
    command = [word.replace("/plan/", f"{tmp_path}/") for word in container["command"]]
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(command, env={**env, "PATH": path}, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "said").read_text().split()
    flags = dict(zip(said[:-3:2], said[1:-3:2], strict=True))
    address = told.get("PET_MASTER_ADDR", told.get("MASTER_ADDR", "tightfit-0.tightfit"))
    port = told.get("PET_MASTER_PORT", "29500")
    assert flags == {
        "--nnodes": "2",
        "--nproc_per_node": "8",
        "--node_rank": "1",
        "--master_addr": address,
        "--master_port": port,
    }
    assert said[-3:] == ["--module", "tightfit.train", "worker.json"]
    seen = (tmp_path / "told").read_text()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in seen
    grace = trees["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace}\n" in seen, "torchrun must not kill before Kubernetes does"


def test_without_the_target_there_is_no_manifest(make_plan: MakePlan) -> None:
    files = render(make_plan(ZERO3, parse_hardware("2x8xA100-80GB"), Job(model="qwen2.5-7b")), Target())
    assert not set(MANIFESTS) & set(files)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in files["launch.sh"]
