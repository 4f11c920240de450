"""launch.sh is run with stand-ins that note what they were called with; the real launchers then read that."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.formats.accelerate.write import accelerate_yaml
from tightfit.formats.dialect import launchers
from tightfit.formats.launch.environment import environment, gpu_ids_of
from tightfit.formats.launch.hostfile import hostfile_text, parse_hostfile
from tightfit.formats.launch.script import launch_sh
from tightfit.formats.target import Target
from tightfit.hardware.words import parse_hardware
from tightfit.job import Data, Job
from tightfit.planner.plan import Plan
from tightfit.types import ConfigError, Levers

FILES = ("worker.json", "deepspeed.json", "accelerate.yaml", "llamafactory.yaml", "dataset_info.json", "hostfile")
OFFLOADED = Levers(engine="zero3", offload_optimizer="cpu")
FSDP2 = Levers(engine="fsdp2")
HOSTS = "alpha slots=8\nbeta slots=8\n"
PlanOf = Callable[..., Plan]

STAND_IN = """#!/usr/bin/env python3
import json, os, sys
note = {"argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}
with open(os.environ["NOTE"], "w") as file:
    json.dump(note, file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a launcher was started with."""

    program: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str


class Folder:
    """A plan's folder, with a space in its name, and the launchers' stand-ins."""

    def __init__(self, root: Path) -> None:
        self.path = root / "my plan"
        self.path.mkdir()
        self.programs = root / "bin"
        self.programs.mkdir()
        for name in (launcher.program for launcher in launchers().values()):
            (self.programs / name).write_text(STAND_IN, encoding="utf-8")
            (self.programs / name).chmod(0o755)
        for name in FILES:
            (self.path / name).write_text(HOSTS if name == "hostfile" else "{}", encoding="utf-8")
        self.elsewhere = root

    def run(self, text: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        (self.path / "launch.sh").write_text(text, encoding="utf-8")
        clean = {"PATH": f"{self.programs}:/usr/bin:/bin", "NOTE": str(self.path / "note.json"), "HOME": "/"}
        command = ["bash", str(self.path / "launch.sh"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=clean | env, cwd=self.elsewhere)

    def call(self, text: str, *arguments: str, **env: str) -> Call:
        done = self.run(text, *arguments, **env)
        assert done.returncode == 0, done.stderr
        note = json.loads((self.path / "note.json").read_text(encoding="utf-8"))
        program, *rest = note["argv"]
        return Call(program=Path(program).name, arguments=rest, env=note["env"], cwd=note["cwd"])


@pytest.fixture
def plan_of(make_plan: PlanOf) -> PlanOf:
    def make(levers: Levers = OFFLOADED, gpus: str = "4xRTX4090", **job: Any) -> Plan:
        return make_plan(levers, parse_hardware(gpus), Job(model="qwen2.5-7b", **job))

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def start(folder: Folder, plan: Plan, target: Target, *arguments: str, **env: str) -> Call:
    return folder.call(launch_sh(plan, target, FILES), *arguments, **env)


# --- the command, as the real launchers read it -------------------------------------------------


def as_deepspeed(call: Call) -> Any:
    from deepspeed.launcher.runner import parse_args

    assert call.program == "deepspeed"
    return parse_args(call.arguments)


def as_torchrun(call: Call) -> Any:
    from torch.distributed.run import parse_args

    assert call.program == "torchrun"
    return parse_args(call.arguments)


def as_accelerate(call: Call) -> Any:
    from accelerate.commands.launch import launch_command_parser

    assert (call.program, call.arguments[0]) == ("accelerate", "launch")
    return launch_command_parser().parse_args(call.arguments[1:])


def test_deepspeed_gets_the_first_gpus_and_our_worker(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(), Target(), "--resume", "with space")
    args = as_deepspeed(call)
    assert args.include == "localhost:0,1,2,3"
    assert args.master_port == 29500
    assert (args.module, args.user_script) == (True, "tightfit.train")
    assert args.user_args == ["worker.json", "--resume", "with space"]
    assert args.no_local_rank
    assert call.cwd == str(folder.path)


def test_accelerate_would_overrule_visible_devices_so_it_is_told_none(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(), Target(launcher="accelerate"), CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert as_accelerate(call).gpu_ids is None
    assert call.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "gpu_ids" not in accelerate_yaml(plan_of(), Target(launcher="accelerate"), "deepspeed.json")
    call = start(folder, plan_of(gpus="4xK100-64GB"), Target(launcher="accelerate"), HIP_VISIBLE_DEVICES="4,5,6,7")
    visible = {name: value for name, value in call.env.items() if name.endswith("VISIBLE_DEVICES")}
    assert visible == {"HIP_VISIBLE_DEVICES": "4,5,6,7"}, "two that differ leave no GPU"


def test_deepspeed_would_ignore_visible_devices_so_they_are_handed_on(plan_of: PlanOf, folder: Folder) -> None:
    args = as_deepspeed(start(folder, plan_of(), Target(), CUDA_VISIBLE_DEVICES="4,5,6,7"))
    assert args.include == "localhost:4,5,6,7"


@pytest.mark.parametrize("visible", ["4,5", "4,5,6,7", " 4, 5 ,GPU-1", "4,5,-1"])
def test_deepspeed_starts_as_many_ranks_as_the_plan_has(plan_of: PlanOf, folder: Folder, visible: str) -> None:
    plan = plan_of(gpus="2xRTX4090")
    assert as_deepspeed(start(folder, plan, Target(), CUDA_VISIBLE_DEVICES=visible)).include == "localhost:4,5"


@pytest.mark.parametrize(
    ("visible", "sentence"),
    [
        ("", "CUDA_VISIBLE_DEVICES names 0 of the 2 GPUs that the plan uses: name more, or unset it"),
        ("3", "CUDA_VISIBLE_DEVICES names 1 of the 2 GPUs that the plan uses: name more, or unset it"),
        ("GPU-8932f937,GPU-1", "by different numbers, and CUDA_VISIBLE_DEVICES is GPU-8932f937,GPU-1: write numbers"),
        ("MIG-41b3359c,MIG-2", "by different numbers, and CUDA_VISIBLE_DEVICES is MIG-41b3359c,MIG-2: write numbers"),
        ("0,-1", "by different numbers, and CUDA_VISIBLE_DEVICES is 0,-1: write numbers"),
        ("0,0", "by different numbers, and CUDA_VISIBLE_DEVICES is 0,0: write numbers"),
        ("0,$(touch hit)", "by different numbers, and CUDA_VISIBLE_DEVICES is 0,$(touch hit): write numbers"),
    ],
)
def test_visible_devices_that_are_no_slots(plan_of: PlanOf, folder: Folder, visible: str, sentence: str) -> None:
    done = folder.run(launch_sh(plan_of(gpus="2xRTX4090"), Target(), FILES), CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in folder.path.iterdir()} == {*FILES, "launch.sh"}


@pytest.mark.thorough
def test_on_hip_its_own_variable_is_handed_on_and_taken_away(plan_of: PlanOf, folder: Folder) -> None:
    plan = plan_of(gpus="2xK100-64GB")
    call = start(folder, plan, Target(), HIP_VISIBLE_DEVICES="4,5,6", CUDA_VISIBLE_DEVICES="0")
    assert as_deepspeed(call).include == "localhost:4,5"
    assert "HIP_VISIBLE_DEVICES" not in call.env, "DeepSpeed would count the GPUs that it leaves, and find no slot 4"
    assert as_deepspeed(start(folder, plan, Target(), CUDA_VISIBLE_DEVICES="2,3")).include == "localhost:2,3"
    assert as_deepspeed(start(folder, plan, Target())).include == "localhost:0,1"
    done = folder.run(launch_sh(plan, Target(), FILES), HIP_VISIBLE_DEVICES="4")
    assert (done.returncode, "HIP_VISIBLE_DEVICES names 1 of the 2" in done.stderr) == (2, True)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "llamafactory"])
def test_others_start_the_ranks_on_the_first_visible_gpus(plan_of: PlanOf, folder: Folder, launcher: str) -> None:
    (folder.path / "train.json").write_text("[]", encoding="utf-8")
    plan, target = plan_of(gpus="2xRTX4090"), Target(launcher=launcher)
    call = start(folder, plan, target, CUDA_VISIBLE_DEVICES="GPU-1,GPU-2,GPU-3")
    assert call.env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2,GPU-3"
    if launcher == "torchrun":
        assert as_torchrun(call).nproc_per_node == "2"
    elif launcher == "accelerate":
        assert "num_processes: 2\n" in accelerate_yaml(plan, target, "deepspeed.json")
    else:
        assert call.env["NPROC_PER_NODE"] == "2"
    done = folder.run(launch_sh(plan, target, FILES), CUDA_VISIBLE_DEVICES="GPU-1")
    assert (done.returncode, "CUDA_VISIBLE_DEVICES names 1 of the 2 GPUs" in done.stderr) == (2, True)


def test_chosen_gpus_win_over_visible_devices(plan_of: PlanOf, folder: Folder) -> None:
    target = Target(gpu_ids=(0, 2, 5, 7), port=29777)
    args = as_deepspeed(start(folder, plan_of(), target, CUDA_VISIBLE_DEVICES="1"))
    assert args.include == "localhost:0,2,5,7"
    assert args.master_port == 29777


def test_two_runs_on_one_machine_differ_by_a_variable(plan_of: PlanOf, folder: Folder) -> None:
    assert as_deepspeed(start(folder, plan_of(), Target(), MASTER_PORT="29600")).master_port == 29600


def test_fsdp2_starts_with_torchrun(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(FSDP2), Target(gpu_ids=(0, 2, 5, 7)), "--resume")
    args = as_torchrun(call)
    assert (args.nnodes, args.nproc_per_node, args.master_port) == ("1", "4", 29500)
    assert (args.module, args.training_script) == (True, "tightfit.train")
    assert args.training_script_args == ["worker.json", "--resume"]
    assert call.env["CUDA_VISIBLE_DEVICES"] == "0,2,5,7"
    assert call.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_accelerate_reads_its_file_and_the_gpus(plan_of: PlanOf, folder: Folder) -> None:
    target = Target(launcher="accelerate", gpu_ids=(0, 2, 5, 7), port=29777)
    call = start(folder, plan_of(), target, "--resume")
    args = as_accelerate(call)
    assert (args.config_file, args.gpu_ids, args.main_process_port) == ("accelerate.yaml", "0,2,5,7", 29777)
    assert (args.module, args.training_script) == (True, "tightfit.train")
    assert args.training_script_args == ["worker.json", "--resume"]
    assert "CUDA_VISIBLE_DEVICES" not in call.env


def test_accelerate_itself_takes_the_flags_beside_its_file(
    plan_of: PlanOf, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command

    target = Target(launcher="accelerate", gpu_ids=(0, 2, 5, 7), port=29777)
    (folder.path / "accelerate.yaml").write_text(accelerate_yaml(plan_of(), target, "deepspeed.json"))
    args = as_accelerate(start(folder, plan_of(), target))
    monkeypatch.chdir(folder.path)
    args, _, _ = _validate_launch_command(args)
    assert (args.use_deepspeed, args.num_processes, args.gpu_ids) == (True, 4, "0,2,5,7")
    assert (args.main_process_port, args.deepspeed_config_file) == (29777, "deepspeed.json")


def test_llamafactory_is_told_by_variables(plan_of: PlanOf, folder: Folder) -> None:
    (folder.path / "train.json").write_text("[]", encoding="utf-8")
    call = start(folder, plan_of(), Target(launcher="llamafactory"), "max_steps=2")
    assert call.program == "llamafactory-cli"
    assert call.arguments == ["train", "llamafactory.yaml", "max_steps=2"]
    told = {name: call.env[name] for name in ("FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES", "MASTER_PORT")}
    assert told == {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "4", "NNODES": "1", "MASTER_PORT": "29500"}


# --- several nodes ------------------------------------------------------------------------------


def test_deepspeed_finds_the_nodes_in_the_hostfile(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(gpus="2x4xRTX4090"), Target(hostfile=HOSTS))
    args = as_deepspeed(call)
    assert (args.hostfile, args.num_nodes, args.num_gpus, args.include) == ("hostfile", 2, 4, "")
    sent = dict(line.split("=", 1) for line in (folder.path / ".deepspeed_env").read_text().splitlines())
    assert sent["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert set(sent) == {"PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"}


def test_deepspeed_reads_chosen_gpus_of_each_node(plan_of: PlanOf, folder: Folder) -> None:
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    target = Target(hostfile=HOSTS, gpu_ids=(1, 3, 5, 7))
    args = as_deepspeed(start(folder, plan_of(gpus="2x4xRTX4090"), target))
    pool = fetch_hostfile(str(folder.path / args.hostfile))
    assert parse_inclusion_exclusion(pool, args.include, "") == {"alpha": [1, 3, 5, 7], "beta": [1, 3, 5, 7]}


@pytest.mark.parametrize(("launcher", "levers"), [("torchrun", FSDP2), ("accelerate", OFFLOADED)])
def test_other_launchers_are_told_which_node_they_are(
    plan_of: PlanOf, folder: Folder, launcher: str, levers: Levers
) -> None:
    plan, target = plan_of(levers, "2x4xRTX4090"), Target(launcher=launcher)
    call = start(folder, plan, target, NODE_RANK="1", MASTER_ADDR="alpha")
    if launcher == "torchrun":
        args = as_torchrun(call)
        assert (args.nnodes, args.node_rank, args.master_addr) == ("2", 1, "alpha")
    else:
        args = as_accelerate(call)
        assert (args.machine_rank, args.main_process_ip) == (1, "alpha")
        assert args.deepspeed_multinode_launcher == "standard"
    silent = folder.run(launch_sh(plan, target, FILES))
    assert silent.returncode != 0
    assert "NODE_RANK: set it for each node" in silent.stderr


# --- the environment ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_cores_are_shared_out_under_offload(plan_of: PlanOf, folder: Folder) -> None:
    nproc = folder.programs / "nproc"  # the real one answers with OMP_NUM_THREADS as well, where that is set
    nproc.write_text('#!/bin/sh\necho "${OMP_NUM_THREADS:-7}"\n', encoding="utf-8")
    nproc.chmod(0o755)
    threads = [
        start(folder, plan_of(gpus=word), Target(), OMP_NUM_THREADS="1").env["OMP_NUM_THREADS"]
        for word in ("1xRTX4090", "2xRTX4090", "8xRTX4090")
    ]
    assert threads == ["7", "4", "1"]


def test_gpus_that_are_left_to_others_keep_their_cores(plan_of: PlanOf, folder: Folder) -> None:
    nproc = folder.programs / "nproc"
    nproc.write_text("#!/bin/sh\necho 32\n", encoding="utf-8")
    nproc.chmod(0o755)
    half = Target(gpu_ids=(4, 5, 6, 7), gpus_of_node=8)
    assert start(folder, plan_of(gpus="4xRTX4090"), half).env["OMP_NUM_THREADS"] == "4"


def test_a_stream_updates_with_all_cores(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(Levers(engine="stream"), gpus="1xRTX4090"), Target())
    assert int(call.env["OMP_NUM_THREADS"]) >= 1
    adapters = start(folder, plan_of(Levers(engine="stream", method="lora"), gpus="1xRTX4090"), Target())
    assert "OMP_NUM_THREADS" not in adapters.env


def test_threads_are_left_alone_without_offload(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(Levers(engine="zero2")), Target())
    assert "OMP_NUM_THREADS" not in call.env
    assert call.env["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.thorough
def test_growing_segments_are_for_cuda_only(plan_of: PlanOf, folder: Folder) -> None:
    cuda = start(folder, plan_of(), Target())
    assert cuda.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for word in ("4xK100-64GB", "4xMI300X"):
        assert "PYTORCH_CUDA_ALLOC_CONF" not in start(folder, plan_of(gpus=word), Target()).env


def test_llamafactory_may_not_set_growing_segments_on_a_dcu(plan_of: PlanOf, folder: Folder) -> None:
    (folder.path / "train.json").write_text("[]", encoding="utf-8")
    plan = plan_of(gpus="4xK100-64GB")
    new = start(folder, plan, Target(launcher="llamafactory", llamafactory_version="0.9.5"))
    assert new.env["OPTIM_TORCH"] == "0"
    old = start(folder, plan, Target(launcher="llamafactory", llamafactory_version="0.9.2"))
    assert "OPTIM_TORCH" not in old.env


def test_one_variable_chooses_the_gpus_of_a_dcu_machine(plan_of: PlanOf, folder: Folder) -> None:
    target = Target(launcher="torchrun", gpu_ids=(0, 2, 5, 7))
    plan = plan_of(gpus="4xK100-64GB")
    call = start(folder, plan, target, CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="1")
    visible = {name: value for name, value in call.env.items() if name.endswith("VISIBLE_DEVICES")}
    assert visible == {"HIP_VISIBLE_DEVICES": "0,2,5,7"}
    call = start(folder, plan, Target(gpu_ids=(0, 2, 5, 7)), HIP_VISIBLE_DEVICES="1")
    assert as_deepspeed(call).include == "localhost:0,2,5,7"
    assert "HIP_VISIBLE_DEVICES" not in call.env


def test_the_toolkit_of_a_dcu_machine_is_sourced(plan_of: PlanOf, folder: Folder) -> None:
    toolkit = folder.path / "dtk"
    toolkit.mkdir()
    (toolkit / "env.sh").write_text('export FOUND="$NEVER_SET yes"\n', encoding="utf-8")
    call = start(folder, plan_of(gpus="4xK100-64GB"), Target(), DTK_ROOT=str(toolkit))
    assert call.env["FOUND"] == " yes"


def test_what_guides_recommend_and_we_leave_out_is_not_set(plan_of: PlanOf, folder: Folder) -> None:
    call = start(folder, plan_of(), Target())
    rows = {variable.name: variable for variable in environment(plan_of(), Target())}
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_USE_CUDA_DSA", "NCCL_P2P_DISABLE"):
        assert name not in call.env
        assert rows[name].value is None
    assert all(not str(variable.reason).endswith(".") for variable in rows.values())


# --- what is asked before anything starts --------------------------------------------------------


def test_a_missing_file_is_named(plan_of: PlanOf, folder: Folder) -> None:
    (folder.path / "deepspeed.json").unlink()
    done = folder.run(launch_sh(plan_of(), Target(), FILES))
    assert (done.returncode, done.stderr) == (2, "launch.sh: deepspeed.json is missing: copy the whole folder\n")


def test_a_missing_launcher_is_named(plan_of: PlanOf, folder: Folder) -> None:
    (folder.programs / "deepspeed").unlink()
    done = folder.run(launch_sh(plan_of(), Target(), FILES))
    assert done.returncode == 2
    assert "deepspeed is not on PATH" in done.stderr


def test_missing_data_is_named_and_its_name_is_never_shell(plan_of: PlanOf, folder: Folder) -> None:
    name = "data/$(touch hit) 'it`s.jsonl"
    text = launch_sh(plan_of(data=Data(path=name)), Target(), FILES)
    done = folder.run(text)
    assert done.returncode == 2
    assert f"no data at {name}, counted from {folder.path}" in done.stderr
    (folder.path / "data").mkdir()
    (folder.path / name).write_text("", encoding="utf-8")
    assert folder.run(text).returncode == 0
    assert not (folder.path / "hit").exists()


def test_a_data_set_of_the_hub_is_not_looked_for(plan_of: PlanOf, folder: Folder) -> None:
    assert start(folder, plan_of(data=Data(path="tatsu-lab/alpaca")), Target()).program == "deepspeed"


def test_a_launcher_without_its_file_is_refused(plan_of: PlanOf) -> None:
    with pytest.raises(ConfigError, match=r"llamafactory needs llamafactory\.yaml"):
        launch_sh(plan_of(), Target(launcher="llamafactory"), ["worker.json"])


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 0, 1, 2), (-1, 0, 1, 2)])
def test_gpu_ids_that_cannot_be(plan_of: PlanOf, ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="gpu_ids"):
        launch_sh(plan_of(), Target(gpu_ids=ids), FILES)


def test_more_gpu_ids_than_needed_give_the_first(plan_of: PlanOf) -> None:
    assert gpu_ids_of(plan_of(), Target(gpu_ids=(7, 6, 5, 4, 3))) == (7, 6, 5, 4)


def test_the_cpu_starts_with_torchrun(plan_of: PlanOf, folder: Folder) -> None:
    plan = plan_of(Levers(engine="zero2"), "2x8GB")
    assert plan.chosen is not None
    gpu = replace(plan.hardware.gpu, vendor="cpu", name="CPU")
    way = replace(plan.chosen, hardware=replace(plan.hardware, gpu=gpu))
    call = start(folder, replace(plan, chosen=way), Target())
    assert as_torchrun(call).nproc_per_node == "2"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in call.env


EVERY = [
    (launcher, gpus, ids)
    for launcher in launchers()
    for gpus in ("4xRTX4090", "2x4xK100-64GB", "1x6GB")
    for ids in (None, (0, 2, 3, 5))
]


@pytest.mark.parametrize(("launcher", "gpus", "ids"), EVERY)
def test_every_script_is_shell(
    plan_of: PlanOf, launcher: str, gpus: str, ids: tuple[int, ...] | None, tmp_path: Path
) -> None:
    plan = plan_of(gpus=gpus, data=Data(path="d.jsonl"))
    target = Target(launcher=launcher, gpu_ids=ids)
    text = launch_sh(plan, target, FILES)
    assert text == launch_sh(plan, target, FILES)
    script = tmp_path / "launch.sh"
    script.write_text(text, encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


# --- hostfiles ----------------------------------------------------------------------------------


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    text = "# the cluster\nalpha slots=8\n\n10.0.0.2   slots=4  # the old one\nnode-3.local slots=1"
    (tmp_path / "hostfile").write_text(text, encoding="utf-8")
    hosts = parse_hostfile(text)
    assert dict(hosts) == fetch_hostfile(str(tmp_path / "hostfile"))
    assert parse_hostfile(hostfile_text(hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("alpha slots=8\nbeta slots 8", "line 2 of the hostfile, 'beta slots 8', is not a node: write `name slots=8`"),
        ("alpha", "line 1 of the hostfile, 'alpha', is not a node: write `name slots=8`"),
        ("-oProxyCommand=x slots=8", "line 1 of the hostfile, '-oProxyCommand=x slots=8', is not a node"),
        ("alpha slots=0", "line 1 of the hostfile gives alpha no slots: write its number of GPUs"),
        ("a slots=8\n#\na slots=8", "the hostfile names a in lines 1 and 3: keep one"),
        ("# nothing\n", "the hostfile names no node: write a line `name slots=8` for each"),
    ],
)
def test_a_bad_hostfile_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("hosts", "sentence"),
    [
        ("alpha slots=8\n", "names 1 of the 2 nodes"),
        ("alpha slots=8\nbeta slots=2\n", "gives beta 2 slots and the plan uses GPU 7 of each node: write slots=8"),
    ],
)
def test_a_hostfile_too_small_for_the_plan(plan_of: PlanOf, hosts: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch_sh(plan_of(gpus="2x4xRTX4090"), Target(hostfile=hosts, gpu_ids=(1, 3, 5, 7)), FILES)


def test_a_hostfile_is_checked_without_chosen_gpus_too(plan_of: PlanOf) -> None:
    with pytest.raises(ConfigError, match="gives beta 2 slots"):
        launch_sh(plan_of(gpus="2x4xRTX4090"), Target(hostfile="alpha slots=8\nbeta slots=2"), FILES)
