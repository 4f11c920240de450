"""From flags, files and the machine to a run that can be started: the plan, its files, its GPUs.

Everything that a user can have got wrong is said here, before anything is written or started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.cli.train_flags import TrainOptions
from tightfit.cli.train_machine import Nodes, TrainingMachine, machine_for, nodes_of
from tightfit.cli.train_pins import check_weights, pin_deepspeed, with_a_scan_that_runs, with_whole_folder
from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan_files import Startable, startable_of, target_for, way_out
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import Request
from tightfit.formats.worker.read import WORKER_FILE
from tightfit.formats.worker.write import without_data
from tightfit.hardware.occupancy import Device, Occupancy
from tightfit.inputs.surroundings import is_installed
from tightfit.inputs.versions import is_version, release
from tightfit.job import Job
from tightfit.messages import Message, Said, text
from tightfit.planner import plan_within
from tightfit.planner.plan import Plan
from tightfit.planner.tiers import plan_tier
from tightfit.runs.records import WorkerFile, placed, read_plan_folder, worker_file
from tightfit.types import FSDP2, ConfigError, HardwareError

if TYPE_CHECKING:
    from tightfit.formats.target import Target

LEAST_TORCH = (2, 5)
"""The oldest that the worker is written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A run that can be started."""

    worker: WorkerFile
    files: Mapping[str, str]
    """The plan, rendered: by name."""
    folder: Path
    nodes: Nodes
    occupancy: Occupancy
    devices: tuple[Device, ...]
    """The GPUs of this machine that it will use; none, where the CPU stands in or other machines do it."""
    plan: Plan | None
    """None: it was written before."""
    said: tuple[Said, ...] = ()

    @property
    def own_folder(self) -> Path:
        """Where this node keeps plan and logs; the run's own folder is node 0's to make."""
        rank = self.nodes.rank
        return self.folder.with_name(f"{self.folder.name}-node{rank}") if rank else self.folder


def prepare(request: Request, options: TrainOptions) -> Ready:
    """The run that was asked for, checked."""
    nodes = nodes_of(request, options)
    machine = machine_for(request, options, nodes)
    if options.plan is not None:
        ready = _from_folder(options.plan, request, machine, nodes)
    else:
        ready = _plan(request, options, machine, nodes)
    check_packages(ready.worker)
    return ready


# --- a new plan ---------------------------------------------------------------------------------


def _plan(request: Request, options: TrainOptions, machine: TrainingMachine, nodes: Nodes) -> Ready:
    settled = resolve_request(request, machine.adapt, runs_here=nodes.hostfile is None)
    on_gpu = settled.hardware.gpu.vendor != "cpu"
    if options.deepspeed_config is not None:
        settled = pin_deepspeed(settled, options.deepspeed_config)
    settled = with_a_scan_that_runs(settled, on_gpu=on_gpu)
    settled = replace(
        settled,
        job=with_whole_folder(settled.job),
        said=(*check_weights(settled.job), *without_data(settled.job), *settled.said),
    )
    check_data(settled.job)
    target = target_of_run(request, nodes)
    startable = startable_of(settled.job, target, calibration_of(request, settled.job))
    answer = answer_of(request, settled, startable, every_gpu=nodes.count > 1)
    if answer.chosen is None:
        raise NothingFits(answer)
    files = rendered(answer, settled.job, target)
    worker = worker_file(files[WORKER_FILE], WORKER_FILE)
    ids = settled.job.hardware.gpu_ids
    _check_nodes(nodes, worker)
    return Ready(
        worker=worker,
        files=files,
        folder=Path(settled.job.saving.folder),
        nodes=nodes,
        occupancy=machine.occupancy,
        devices=() if nodes.hostfile is not None else machine.devices_for(worker, ids),
        plan=answer,
    )


HOW_FAR = Message("cli.tightfit-plan-same")


class NothingFits(ConfigError):
    """With all that was priced, for whoever shows how far it is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Message("cli.nothing-fits-so", plan=way_out(plan, str(HOW_FAR))))
        self.plan = plan


def answer_of(request: Request, settled: PlanInput, startable: Startable, *, every_gpu: bool) -> Plan:
    """The plan. `every_gpu`: machines that were named all run; the search alone might do with one of them."""
    from tightfit.desk.plan import of_the_file

    job, said = settled.job, (*settled.said, *startable.said)
    try:
        if job.tier is None:
            return plan_within(startable.bounds(every_gpu=every_gpu), job, settled.shape, settled.hardware, said)
        if job.tier == "all":
            raise ConfigError(Message("cli.tier-all-comparison"))
        found = plan_tier(job.tier, job, settled.shape, settled.hardware, settled.explicit, startable.calibration)
    except ConfigError as error:
        raise of_the_file(error, request) from None
    if found.plan is None:
        raise ConfigError(found.problem)
    if found.without_it is not None:
        raise ConfigError(Message("cli.tier-does-fit", name=found.tier.name, without_it=found.without_it))
    return replace(found.plan, because=(*said, *found.because, *found.plan.because))


def target_of_run(request: Request, nodes: Nodes) -> Target:
    """What the plan of a run is rendered for."""
    from tightfit.desk.plan_files import target_of
    from tightfit.formats.target import Target

    hosts = Request(launcher="deepspeed", hostfile=request.hostfile) if nodes.hostfile is not None else None
    found = Target() if hosts is None else target_of(hosts)
    assert found is not None
    return found if request.port is None else replace(found, port=request.port)


def rendered(answer: Plan, job: Job, target: Target) -> Mapping[str, str]:
    from tightfit.formats.render import render

    assert answer.chosen is not None
    return render(answer, target_for(answer, job, target))


# --- a plan that was written before -------------------------------------------------------------


def _from_folder(plan: str, request: Request, machine: TrainingMachine, nodes: Nodes) -> Ready:
    source = Path(plan).expanduser().absolute()
    files = dict(read_plan_folder(source))
    worker = worker_file(files[WORKER_FILE], str(source / WORKER_FILE))
    folder = (source / Path(worker.folder).expanduser()).absolute()
    if "output" in request.flags:
        folder = Path(request.flags["output"]).expanduser().absolute()
    files[WORKER_FILE] = placed(files[WORKER_FILE], folder)
    _check_nodes(nodes, worker)
    devices = () if nodes.hostfile is not None else machine.devices_for(worker, _ids(request.flags.get("gpu_ids")))
    if nodes.hostfile is None:
        machine.check(worker)
    return Ready(
        worker=worker,
        files=files,
        folder=folder,
        nodes=nodes,
        occupancy=machine.occupancy,
        devices=devices,
        plan=None,
        said=(text("cli.plan-one", source=source),),
    )


def _ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and len(word) < 6 for word in words) or len(set(words)) < len(words):
        raise ConfigError(Message("cli.gpu-ids-takes-different", text=repr(text)))
    return tuple(map(int, words))


# --- checks -------------------------------------------------------------------------------------


def _check_nodes(nodes: Nodes, worker: WorkerFile) -> None:
    """The plan's number of nodes must be the number that was said."""
    if nodes.hostfile is not None or worker.nodes == nodes.count:
        return
    if nodes.count == 1:
        raise HardwareError(Message("cli.plan-nodes-name", nodes=worker.nodes))
    raise HardwareError(Message("cli.plan-uses-were", used=worker.nodes, count=nodes.count))


def check_data(job: Job) -> None:
    from tightfit.formats.llamafactory.write import DATASET_INFO, listed, names_a_file

    path = job.data.path
    if path is None or not names_a_file(path):
        return
    entry = listed(path)
    place = Path(path) if entry is None else Path(entry[0], DATASET_INFO)
    if not place.expanduser().exists():
        raise ConfigError(Message("cli.there-data-at", path=path))


def check_packages(worker: WorkerFile) -> None:
    """What the worker could not start without; finding out costs it half a minute of imports."""
    needed = ["torch", "transformers"]
    needed += ["deepspeed"] if worker.engine != FSDP2 else []
    needed += ["peft"] if worker.method != "full" else []
    for package in needed:
        if not is_installed(package):
            raise ConfigError(Message("cli.training-needs-installed", package=package))
    check_torch(version("torch"))
    what = "--method qlora" if worker.method == "qlora" else f"--optimizer {worker.optimizer}"
    if ("8bit" in worker.optimizer or worker.method == "qlora") and not is_installed("bitsandbytes"):
        raise ConfigError(Message("cli.needs-bitsandbytes-installed", what=what))


def check_torch(found: str) -> None:
    """A vendor's build is never replaced for the user, so an old one has to be named."""
    if is_version(found) and release(found) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(Message("cli.torch-older-than", found=found, least=least))
