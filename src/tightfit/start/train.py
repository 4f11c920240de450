"""From flags, files and the machine to a run that can be started: the plan, its files, its GPUs, where it begins.

Everything that a user can have got wrong is said here, before anything is written or started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.desk.calibration import calibration_of
from tightfit.desk.plan import bounds_of, left_out, of_the_file, read_hostfile, render_plan, target_of, way_out
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import Request
from tightfit.formats.worker.read import WORKER_FILE, find_worker, parse_worker
from tightfit.formats.worker.write import seeded, without_data
from tightfit.hardware.machine import Device, Occupancy, occupancy, this_machine
from tightfit.hardware.slurm import slurm_node
from tightfit.inputs.flags import LEVERS, TRAINING, flags_from_levers, levers_as_written
from tightfit.inputs.surroundings import inherited, is_installed
from tightfit.inputs.versions import is_version, release
from tightfit.job import Adapters, Data, Evaluation, Job, Limits, Machine, Saving
from tightfit.job.file import model_of
from tightfit.memory import estimate
from tightfit.messages import Message, Said, text
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.pace import pace
from tightfit.planner import plan_tier, plan_within
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.runs.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    Torn,
    folder_of,
    newest_first,
    read_manifest,
    states_folder,
    step_of,
    written_first,
)
from tightfit.runs.folder import AUTO, NONE, goes_on
from tightfit.runs.own import Resume
from tightfit.runs.records import WorkerFile, placed, read_plan_folder, worker_file
from tightfit.runs.supervise import MAX_ATTEMPTS
from tightfit.start.machine import Nodes, TrainingMachine, reservations
from tightfit.types import (
    FSDP2,
    Buckets,
    ConfigError,
    Footprint,
    Hardware,
    HardwareError,
    Levers,
    Mamba1,
    Mamba2,
    ModelError,
    ModelShape,
)

if TYPE_CHECKING:
    from tightfit.formats.target import Target

LEAST_TORCH = (2, 5)
"""The oldest that the worker is written for."""
DEFAULT_PORT = 29500
"""Where the ranks of several machines meet: each machine must name the same."""
MOST_MARGIN = 0.89


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is said of the run itself, beside what is asked of its plan."""

    plan: str | None = None
    """The folder of a plan that was written before."""
    overwrite: bool = False
    take_over: bool = False
    dry_run: bool = False
    check_memory: bool = False
    no_probe: bool = False
    tensorboard: bool = False
    wandb: bool = False
    resume: str = AUTO
    trust_pickle: bool = False
    resume_anyway: bool = False
    max_attempts: int = MAX_ATTEMPTS
    hang_timeout: str | None = None
    wait_for_gpu: bool = False
    deepspeed_config: str | None = None
    max_gpus: int | None = None
    nodes: int | None = None
    """Of SLURM or one, where nothing is said."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    json: bool = False


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


def machine_for(request: Request, options: TrainOptions) -> TrainingMachine:
    """This machine as it is now, with others as flags or SLURM say."""
    port = request.port
    nodes = Nodes(port=port)
    if request.hostfile is not None:
        from tightfit.formats.launch.hostfile import parse_hostfile

        hosts = read_hostfile(request.hostfile)
        nodes = Nodes(count=len(parse_hostfile(hosts)), port=port, hostfile=hosts)
    elif options.nodes is not None:
        port = port or (DEFAULT_PORT if options.nodes > 1 else None)
        nodes = Nodes(count=options.nodes, rank=options.node_rank, address=options.master_addr, port=port)
    elif (found := slurm_node(inherited({}))) is not None:
        nodes = Nodes(count=found.nodes, rank=found.rank, address=found.address, port=port or found.port)
    machine = TrainingMachine(
        occupancy=occupancy(),
        live=reservations().live(),
        nodes=nodes,
        num_gpus=request.num_gpus,
        max_gpus=options.max_gpus,
    )
    if "gpu_ids" in request.flags:
        machine.check_ids(named="gpus" in request.flags)
    return machine


def prepare(request: Request, options: TrainOptions) -> Ready:
    """The run that was asked for, checked."""
    machine = machine_for(request, options)
    nodes = machine.nodes
    if options.plan is not None:
        source = Path(options.plan).expanduser().absolute()
        files = dict(read_plan_folder(source))
        worker = worker_file(files[WORKER_FILE], str(source / WORKER_FILE))
        folder = (source / Path(worker.folder).expanduser()).absolute()
        if "output" in request.flags:
            folder = Path(request.flags["output"]).expanduser().absolute()
        files[WORKER_FILE] = placed(files[WORKER_FILE], folder)
        _check_nodes(nodes, worker)
        devices: tuple[Device, ...] = ()
        if nodes.hostfile is None:
            ids, words = request.flags.get("gpu_ids"), []
            if ids is not None:
                words = [word.strip() for word in ids.split(",")]
                if not all(word.isdigit() and len(word) < 6 for word in words) or len(set(words)) < len(words):
                    raise ConfigError(Message("cli.gpu-ids-takes-different", text=repr(ids)))
            devices = machine.devices_for(worker, [int(word) for word in words] or None)
            machine.check_ram(worker)
        ready = Ready(
            worker=worker,
            files=files,
            folder=folder,
            nodes=nodes,
            occupancy=machine.occupancy,
            devices=devices,
            plan=None,
            said=(text("cli.plan-one", source=source),),
        )
    else:
        settled = resolve_request(request, machine.adapt, runs_here=nodes.hostfile is None)
        if options.deepspeed_config is not None:
            settled = _pin_deepspeed(settled, options.deepspeed_config)
        settled = with_a_scan_that_runs(settled)
        settled = replace(settled, said=(*check_weights(settled.job), *without_data(settled.job), *settled.said))
        settled = with_whole_folder(settled)
        target = target_of_run(request, nodes)
        bounds = bounds_of(settled.job, target, calibration_of(request, settled.job))
        # Machines that were named all run; the search alone might do with one of them.
        answer = answer_of(request, settled, replace(bounds, every_gpu=nodes.count > 1))
        if answer.chosen is None:
            raise NothingFits(answer)
        files = render_plan(answer, target, settled.job)
        worker = worker_file(files[WORKER_FILE], WORKER_FILE)
        _check_nodes(nodes, worker)
        ready = Ready(
            worker=worker,
            files=files,
            folder=Path(settled.job.saving.folder),
            nodes=nodes,
            occupancy=machine.occupancy,
            devices=() if nodes.hostfile is not None else machine.devices_for(worker, settled.job.hardware.gpu_ids),
            plan=answer,
        )
    check_packages(ready.worker)
    return ready


# --- a new plan ---------------------------------------------------------------------------------


HOW_FAR = Message("cli.tightfit-plan-same")


class NothingFits(ConfigError):
    """With all that was priced, for whoever shows how far it is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Message("cli.nothing-fits-so", plan=way_out(plan, str(HOW_FAR))))
        self.plan = plan


def _pin_deepspeed(settled: PlanInput, path: str) -> PlanInput:
    """What a DeepSpeed file says, wherever neither flag nor job file says it."""
    from tightfit.formats.deepspeed.read import read_deepspeed

    version = str(settled.job.levers.get("deepspeed_version"))
    settings = read_deepspeed(path, hidden_size=settled.shape.hidden_size, version=version)
    levers: dict[str, Any] = {
        "engine": settings.engine,
        "offload_optimizer": settings.offload_optimizer,
        "offload_param": settings.offload_param,
        "micro_batch": settings.micro_batch,
        "accum": settings.accumulation,
    }
    in_words = flags_from_levers(Levers(buckets=settings.buckets))
    levers |= {flag: value for flag, value in in_words.items() if LEVERS[flag].block == "buckets"}
    if settings.offload_param == "nvme":  # where it must be 0, whatever the file says
        del levers["max_reuse_distance"]
    named = {name: value for name, value in levers.items() if value is not None}
    values: dict[str, Any] = {
        "precision": settings.precision,
        "optimizer": settings.optimizer,
        "master_weights": None if settings.master_weights else False,
        "effective_batch": settings.train_batch,
        "clip": settings.gradient_clipping,
    }
    values = {name: value for name, value in values.items() if value is not None and name not in settled.explicit}
    job = replace(settled.job, **values, levers={**named, **settled.job.levers})
    items = ", ".join(f"{name} {value}" for name, value in list(named.items())[:3])
    said: list[Said] = [text("cli.says-kept", file=settings.file, items=items), *settings.because]
    usual = Buckets()
    for name in ("sub_group_size", "contiguous_gradients"):  # for which a plan has no lever
        if getattr(settings.buckets, name) != getattr(usual, name):
            said.append(text("cli.left-at-deepspeed", name=name, file=settings.file, usual=getattr(usual, name)))
            break
    return replace(settled, job=job, said=(*settled.said, *said))


def with_a_scan_that_runs(settled: PlanInput) -> PlanInput:
    """Mamba's scan is a lever like others, but not every one can run here."""
    kinds = {type(block.mixer) for block in settled.shape.blocks}
    if not kinds & {Mamba1, Mamba2} or settled.job.levers.get("scan") is not None:
        return settled
    if Mamba1 in kinds or settled.hardware.gpu.vendor == "cpu":
        scan, said = "tightfit", text("cli.selective-scan-our")
    elif is_installed("mamba_ssm"):
        scan, said = "official", text("cli.selective-scan-mamba")
    else:
        scan, said = "torch", text("cli.selective-scan-transformers")
    job = replace(settled.job, levers={**settled.job.levers, "scan": scan})
    return replace(settled, job=job, said=(*settled.said, said))


def with_whole_folder(settled: PlanInput) -> PlanInput:
    """The run's folder made absolute, as the ranks start in another one; and its data looked for."""
    from tightfit.formats.llamafactory.write import DATASET_INFO, listed, names_a_file

    job, path = settled.job, settled.job.data.path
    if path is not None and names_a_file(path):
        entry = listed(path)
        place = Path(path) if entry is None else Path(entry[0], DATASET_INFO)
        if not place.expanduser().exists():
            raise ConfigError(Message("cli.there-data-at", path=path))
    folder = str(Path(job.saving.folder).expanduser().absolute())
    return replace(settled, job=replace(job, saving=replace(job.saving, folder=folder)))


def answer_of(request: Request, settled: PlanInput, bounds: Bounds) -> Plan:
    job, said = settled.job, (*settled.said, *left_out(settled.job, bounds))
    try:
        if job.tier is None:
            return plan_within(bounds, job, settled.shape, settled.hardware, said)
        if job.tier == "all":
            raise ConfigError(Message("cli.tier-all-comparison"))
        found = plan_tier(job.tier, job, settled.shape, settled.hardware, settled.explicit, bounds.calibration)
    except ConfigError as error:
        raise of_the_file(error, request) from None
    if found.plan is None:
        raise ConfigError(found.problem)
    if found.without_it is not None:
        raise ConfigError(Message("cli.tier-does-fit", name=found.tier.name, without_it=found.without_it))
    return replace(found.plan, because=(*said, *found.because, *found.plan.because))


def target_of_run(request: Request, nodes: Nodes) -> Target:
    """What the plan of a run is rendered for."""
    from tightfit.formats.target import Target

    hosts = Request(launcher="deepspeed", hostfile=request.hostfile) if nodes.hostfile is not None else None
    found = Target() if hosts is None else target_of(hosts)
    assert found is not None
    return found if request.port is None else replace(found, port=request.port)


# --- a plan that was written before -------------------------------------------------------------


def plan_as_it_is(
    job: Job, shape: ModelShape, levers: Levers, hardware: Hardware, footprint: Footprint, fits: bool | None = None
) -> Plan:
    """What runs already, as a plan of which nothing was searched. `fits`: by more than what a GPU needs."""
    limit = int(hardware.gpu.memory_bytes * (1 - job.limits.margin))
    way = Way(
        shape=shape,
        levers=levers,
        hardware=hardware,
        footprint=footprint,
        pace=pace(shape, levers, hardware),
        fits=footprint.gpu.required_bytes <= limit if fits is None else fits,
        gpu_limit_bytes=limit,
    )
    return Plan(
        job=job,
        shape=shape,
        hardware=hardware,
        effective_batch=way.effective_batch,
        chosen=way,
        alternatives=(),
        considered=1,
        search_s=0.0,
        because=(),
    )


def read_written_plan(folder: Path) -> Plan:
    """The plan in a run's folder, on this machine; ConfigError: why it cannot be read back.

    `worker.json` leaves nothing to be guessed: what is trained comes from it as it was resolved there. What the user
    had pinned is not in it any more: every free lever may change, but for those that depend on what is installed.
    """
    try:
        tree = find_worker(folder)
        levers = levers_as_written(tree)
        model, training, data, lora, world = (tree[name] for name in ("model", "training", "data", "lora", "world"))
        adapters = Adapters()
        if lora is not None:
            targets = lora["targets"] if lora["targets"] == "all" else tuple(lora["targets"])
            adapters = Adapters(targets=targets, **{name: lora[name] for name in ("rank", "alpha", "dropout", "dtype")})
        margin = 1 - float(tree["predicted"]["gpu"]["limit_bytes"]) / float(world["gpu_memory_bytes"])
        learning = ("learning_rate", "schedule", "warmup", "epochs", "max_steps", "weight_decay", "clip", "seed")
        job = Job(
            model=model["weights"] or model["source"],
            **{name: getattr(levers, name) for name in TRAINING if name != "lora"},
            lora=adapters,
            effective_batch=tree["effective_batch"],
            data=Data(**{name: value for name, value in data.items() if name not in ("max_samples", "overlong")}),
            max_samples=data["max_samples"],
            **{name: training[name] for name in learning},
            evaluation=Evaluation(**tree["evaluation"]),
            saving=Saving(**tree["saving"]),
            logging_steps=tree.get("logging_steps"),
            timeout=None if tree["timeout_s"] is None else f"{tree['timeout_s']}s",
            hardware=Machine(nvme_path=tree["nvme_path"]),
            limits=Limits(margin=min(MOST_MARGIN, max(0.0, round(margin, 6)))),
            levers={flag: value for flag, value in flags_from_levers(levers).items() if LEVERS[flag].kept},
            tier=tree["tier"],
            trust_remote_code=model["trust_remote_code"],
        )
        hardware = replace(this_machine(), nodes=world["nodes"], gpus_per_node=world["gpus_per_node"])
        shape = model_of(job)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(Message("cli.plan-s-worker")) from None
    return plan_as_it_is(job, shape, levers, hardware, estimate(shape, levers, hardware.world, hardware))


# --- checks -------------------------------------------------------------------------------------


def _check_nodes(nodes: Nodes, worker: WorkerFile) -> None:
    """The plan's number of nodes must be the number that was said."""
    if nodes.hostfile is not None or worker.nodes == nodes.count:
        return
    if nodes.count == 1:
        raise HardwareError(Message("cli.plan-nodes-name", nodes=worker.nodes))
    raise HardwareError(Message("cli.plan-uses-were", used=worker.nodes, count=nodes.count))


def check_weights(job: Job) -> tuple[Said, ...]:
    """A preset is a shape without weights: adapters need more than that."""
    if not isinstance(job.model, str) or (name := job.model.strip().lower()) not in PRESETS:
        return ()
    if job.method == "full":
        return seeded(job)
    if (public := checkpoint_of(name)) is not None:
        raise ModelError(Message("cli.shape-without-weights", name=name, method=job.method, public=public))
    return (text("cli.public-weights-adapters", name=name),)


def packages_for(engine: str | None, method: str, optimizer: str) -> list[str]:
    """What the worker cannot start without, under an engine that is known or not."""
    needed = ["torch", "transformers"]
    needed += ["deepspeed"] if engine != FSDP2 else []
    needed += ["peft"] if method != "full" else []
    needed += ["bitsandbytes"] if method == "qlora" or "8bit" in optimizer else []
    return needed


def check_packages(worker: WorkerFile) -> None:
    """Finding out what is missing costs the worker half a minute of imports."""
    missing = [name for name in packages_for(worker.engine, worker.method, worker.optimizer) if not is_installed(name)]
    if missing and missing != ["bitsandbytes"]:
        raise ConfigError(Message("cli.training-needs-installed", package=missing[0]))
    check_torch(version("torch"))
    if missing:
        what = "--method qlora" if worker.method == "qlora" else f"--optimizer {worker.optimizer}"
        raise ConfigError(Message("cli.needs-bitsandbytes-installed", what=what))


def check_torch(found: str) -> None:
    """A vendor's build is never replaced for the user, so an old one has to be named."""
    if is_version(found) and release(found) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(Message("cli.torch-older-than", found=found, least=least))


# --- where it begins ----------------------------------------------------------------------------
#
# Which checkpoint is whole is the worker's to find out, since it has to read them anyway. The desk asks only what costs
# nothing: whether there is a checkpoint at a path that was named.


def resume_of(options: TrainOptions) -> Resume:
    """What was asked, or the sentence for what is not there."""
    anyway, trust_pickle, word = options.resume_anyway, options.trust_pickle, options.resume
    if word.lower() in (AUTO, NONE):
        if trust_pickle:
            raise ConfigError(Message("cli.trust-pickle-deepspeed-checkpoint"))
        if anyway and word.lower() == NONE:
            raise ConfigError(Message("cli.resume-none-goes"))
        return Resume(place=word.lower(), anyway=anyway)
    if not word.strip():
        raise ConfigError(Message("cli.resume-takes-auto"))
    place = _find_checkpoint(Path(word).expanduser().absolute())
    return Resume(place=str(place), anyway=anyway, trust_pickle=trust_pickle)


def _find_checkpoint(path: Path) -> Path:
    """The checkpoint, or the run that has one."""
    if not path.exists():
        raise ConfigError(Message("cli.nothing-to-resume-at", path=path))
    if path.name == CHECKPOINTS and step_of(path) is None:
        path = path.parent
    if (path / MANIFEST).is_file() and step_of(path) is None:
        try:
            name = folder_of(path, read_manifest(path).step).name
        except Torn:
            name = text("cli.step-number-step")
        raise ConfigError(Message("cli.checkpoint-under-another", path=path, path2=name))
    if (path / MANIFEST).is_file() or written_first(path) is not None:
        return path
    if (states := states_folder(path)) is not None:
        return states
    if newest_first(path):
        raise ConfigError(Message("cli.checkpoint-finished-tightfit", path=path))
    if step_of(path) is not None:
        raise ConfigError(Message("cli.so-never-finished", path=path, manifest=MANIFEST))
    raise ConfigError(Message("cli.checkpoint-run-checkpoints", path=path))


def describe_resume(resume: Resume, folder: Path, *, more: bool = False) -> str | None:
    """What a start in this folder does that its user may not expect; None: it begins at the beginning. `more`: it
    asks for more than a finished run there made."""
    if resume.place not in (AUTO, NONE):
        return text("cli.resumes-from", place=resume.place)
    step = goes_on(folder, resume.place, more=more)
    if step is None:
        return None
    if (folder / "model").exists():
        return text("cli.holds-finished-run", folder=folder, step=step)
    return text("cli.run-goes-newest", held=text("cli.holds-checkpoints-up", folder=folder, step=step))


def how_to_go_on(resume: Resume, *, wrote: bool) -> str:
    """After a run from which there is a checkpoint; `wrote`: it is one of its own."""
    if resume.place == AUTO or not wrote:
        return text("cli.same-command-goes")
    return text("cli.same-command-without", place=resume.place)


def asks_for_more(folder: Path, worker: str) -> bool:
    """Whether this plan's `worker.json` has more steps or epochs than that of the run that lies in the folder."""
    old = find_worker(folder / "plan").get("training")
    if not isinstance(old, dict):
        return False
    new, steps, epochs = parse_worker(worker, WORKER_FILE)["training"], old.get("max_steps"), old.get("epochs")
    if new["max_steps"] is not None:
        newest = written_first(folder)
        made = steps if isinstance(steps, int) else step_of(newest) if newest is not None else None
        return made is not None and new["max_steps"] > made
    if steps is not None:
        return False  # how many steps an epoch has, nobody has counted yet
    return bool((new["epochs"] or 1) > (epochs if isinstance(epochs, int | float) else 1))
