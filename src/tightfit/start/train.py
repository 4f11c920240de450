"""From flags, files and the machine to a run that can be started: the plan, its files, its GPUs, where it begins.

Everything that a user can have got wrong is said here, before anything is written or started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.desk.calibration import Calibrations, calibration_of
from tightfit.desk.plan import bounds_of, left_out, of_the_file, read_hostfile, render_plan, target_of, way_out
from tightfit.desk.plan_request import PlanInput, resolve_request
from tightfit.desk.request import Request, each_stage
from tightfit.diagnose.verdict import Verdict
from tightfit.formats.deepspeed.read import read_deepspeed
from tightfit.formats.launch.hostfile import parse_hostfile
from tightfit.formats.llamafactory.write import DATASET_INFO, listed, names_a_file
from tightfit.formats.plan_folder import write
from tightfit.formats.target import Target
from tightfit.formats.worker.read import WORKER_FILE, find_worker, parse_worker
from tightfit.formats.worker.write import seeded, without_data
from tightfit.hardware.catalogue import native_bf16
from tightfit.hardware.machine import Device, Occupancy, occupancy, this_machine
from tightfit.hardware.slurm import slurm_node
from tightfit.inputs.flags import LEVERS, TRAINING, flags_from_levers, levers_as_written
from tightfit.inputs.surroundings import cache_folder, inherited, is_installed
from tightfit.inputs.versions import is_version, release
from tightfit.job import Adapters, Data, Evaluation, Job, Limits, Machine, Saving
from tightfit.job.file import job_from_text, model_of
from tightfit.memory import estimate
from tightfit.messages import Listing, Message, Said, text
from tightfit.model.presets import PRESETS, checkpoint_of
from tightfit.pace import pace
from tightfit.planner import plan_tier, plan_within
from tightfit.planner.calibration import Entry, phase_bytes
from tightfit.planner.plan import Bounds, Plan, Way
from tightfit.planner.reasons import lever_changes
from tightfit.planner.saving import is_open
from tightfit.planner.step_down import NoWay, Shortfall, Tried, locate, room_above, step_down
from tightfit.priced import strategy_name
from tightfit.runs import checkpoints, wire
from tightfit.runs.calibration import learn_from_failure, learn_seconds, learned
from tightfit.runs.cause import config_of_plan
from tightfit.runs.checkpoints import CHECKPOINTS, MANIFEST, newest_first, step_of, written_first
from tightfit.runs.events import Tally
from tightfit.runs.folder import AUTO, NONE, goes_on
from tightfit.runs.free_ram import check_free_ram
from tightfit.runs.launch import (
    Meeting,
    RankStart,
    Sight,
    launcher_start,
    rank_starts,
    starts_elsewhere,
    worker_command,
)
from tightfit.runs.leader import Leader, Orders
from tightfit.runs.own import Changed, Refused, Resume
from tightfit.runs.records import RunFolder, WorkerFile, placed, read_plan_folder, worker_file
from tightfit.runs.run import Outcome
from tightfit.runs.supervise import MAX_ATTEMPTS
from tightfit.start.machine import (
    Busy,
    Nodes,
    TrainingMachine,
    check_free,
    reservations,
    taken_gpus,
    wait_while_busy,
)
from tightfit.types import (
    STAGES,
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
    UserError,
)

LEAST_TORCH = (2, 5)  # the oldest that the worker is written for
WAITS_S = 60.0  # for room on a GPU, where nobody said --wait-for-gpu
DEFAULT_PORT = 29500  # where the ranks of several machines meet: each machine must name the same
MOST_MARGIN = 0.89


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is said of the run itself, beside what is asked of its plan."""

    plan: str | None = None  # the folder of a plan that was written before
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
    nodes: int | None = None  # of SLURM or one, where nothing is said
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A run that can be started."""

    worker: WorkerFile
    files: Mapping[str, str]  # the plan, rendered: by name
    folder: Path
    nodes: Nodes
    occupancy: Occupancy
    devices: tuple[Device, ...]
    """The GPUs of this machine that it will use; none, where the CPU stands in or other machines do it."""
    plan: Plan | None  # None: it was written before
    said: tuple[Said, ...] = ()


def node_folder(folder: Path, rank: int) -> Path:
    """Where a node that follows keeps plan and logs; the run's own folder is node 0's to make."""
    return folder.with_name(f"{folder.name}-node{rank}")


def find_own_folder(request: Request, folder: Path, *, is_seen: bool) -> Path | None:
    """The run's folder on the disk of a node that follows; None: it is the leader's. They are two where the leader's is
    not seen here, or where this node was told another one."""
    named = request.flags.get("output")
    if named is None and request.file is not None:
        told = job_from_text(request.file.read(), model=request.model).job.saving.folder
        named = told if told != Saving().folder else None
    own = folder if named is None else Path(named).expanduser().absolute()
    if is_seen and (own == folder or own.resolve() == folder.resolve()):
        return None
    if each_stage(request):
        if is_seen:
            return None
        raise ConfigError(Message("cli.stages-need-shared", folder=folder))
    return own


def nodes_of(request: Request, options: TrainOptions) -> Nodes:
    """The machines of the run, as flags or SLURM say."""
    port = request.port
    nodes = Nodes(port=port)
    if request.hostfile is not None:
        hosts = read_hostfile(request.hostfile)
        nodes = Nodes(count=len(parse_hostfile(hosts)), port=port, hostfile=hosts)
    elif options.nodes is not None:
        port = port or (DEFAULT_PORT if options.nodes > 1 else None)
        nodes = Nodes(count=options.nodes, rank=options.node_rank, address=options.master_addr, port=port)
    elif (found := slurm_node(inherited({}))) is not None:
        nodes = Nodes(count=found.nodes, rank=found.rank, address=found.address, port=port or found.port)
    return nodes


def machine_for(request: Request, options: TrainOptions) -> TrainingMachine:
    """This machine as it is now, with the others."""
    nodes = nodes_of(request, options)
    wanted = {"num_gpus": request.num_gpus, "max_gpus": options.max_gpus}
    machine = TrainingMachine(occupancy=occupancy(), live=reservations().live(), nodes=nodes, **wanted)
    if "gpu_ids" in request.flags:
        machine.check_ids(named="gpus" in request.flags)
    return machine


def prepare(request: Request, options: TrainOptions) -> Ready:
    """The run that was asked for, checked."""
    machine = machine_for(request, options)
    nodes, plan, said, ids = machine.nodes, None, "", None
    if options.plan is not None:
        files, worker, said = read_plan(options.plan)
        folder = Path(options.plan, Path(worker.folder).expanduser()).expanduser().absolute()
        if "output" in request.flags:
            folder = Path(request.flags["output"]).expanduser().absolute()
        files[WORKER_FILE] = placed(files[WORKER_FILE], folder)
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
        plan = answer_of(request, settled, replace(bounds, every_gpu=nodes.count > 1))
        if plan.chosen is None:
            raise NothingFits(plan)
        files, worker = rendered(plan, settled.job, target)
        folder, ids = Path(settled.job.saving.folder), settled.job.hardware.gpu_ids
    if nodes.hostfile is None and worker.nodes != nodes.count:
        if nodes.count == 1:
            raise HardwareError(Message("cli.plan-nodes-name", nodes=worker.nodes))
        raise HardwareError(Message("cli.plan-uses-were", used=worker.nodes, count=nodes.count))
    if plan is None and nodes.hostfile is None:
        ids = _read_gpu_ids(request)
    devices = machine.devices_for(worker, ids) if nodes.hostfile is None else ()
    if plan is None and nodes.hostfile is None:
        machine.check_ram(worker)
    if nodes.hostfile is None:
        check_free_ram(worker.engine, worker.ram_bytes_per_node)
    check_packages(worker)
    return Ready(
        worker=worker,
        files=files,
        folder=folder,
        nodes=nodes,
        occupancy=machine.occupancy,
        devices=devices,
        plan=plan,
        said=(said,) if said else (),
    )


def prepare_node(request: Request, options: TrainOptions, files: Mapping[str, str], folder: Path) -> Ready:
    """What the leader of several nodes has planned, on this one of them."""
    machine, worker = machine_for(request, options), worker_file(files[WORKER_FILE], WORKER_FILE)
    ids = _read_gpu_ids(request)
    if ids is None and request.file is not None:
        ids = job_from_text(request.file.read(), model=request.model).job.hardware.gpu_ids
    devices = machine.devices_for(worker, ids)
    machine.check_ram(worker)
    check_packages(worker)
    return Ready(
        worker=worker,
        files=files,
        folder=folder,
        nodes=machine.nodes,
        occupancy=machine.occupancy,
        devices=devices,
        plan=None,
    )


def _read_gpu_ids(request: Request) -> tuple[int, ...] | None:
    """As the flag says it; None: it says nothing."""
    word = request.flags.get("gpu_ids")
    if word is None:
        return None
    words = [each.strip() for each in word.split(",")]
    if not all(each.isdigit() and len(each) < 6 for each in words) or len(set(words)) < len(words):
        raise ConfigError(Message("cli.gpu-ids-takes-different", text=repr(word)))
    return tuple(map(int, words))


def read_plan(folder: str) -> tuple[dict[str, str], WorkerFile, str]:
    """A plan that was written before: its files, what the worker is told, and the sentence that says so."""
    source = Path(folder).expanduser().absolute()
    files = dict(read_plan_folder(source))
    return files, worker_file(files[WORKER_FILE], str(source / WORKER_FILE)), text("cli.plan-one", source=source)


# --- a new plan ---------------------------------------------------------------------------------


HOW_FAR = Message("cli.tightfit-plan-same")


class NothingFits(ConfigError):
    """With all that was priced, for whoever shows how far it is."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Message("cli.nothing-fits-so", plan=way_out(plan, str(HOW_FAR))))
        self.plan = plan


def _pin_deepspeed(settled: PlanInput, path: str) -> PlanInput:
    """What a DeepSpeed file says, wherever neither flag nor job file says it."""
    version = str(settled.job.levers.get("deepspeed_version"))
    settings = read_deepspeed(path, hidden_size=settled.shape.hidden_size, version=version)
    names = ("engine", "offload_optimizer", "offload_param", "micro_batch")
    levers: dict[str, Any] = {name: getattr(settings, name) for name in names} | {"accum": settings.accumulation}
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
            bounds = replace(bounds, saving_is_open=is_open(settled.explicit, job))
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
    found = Target()
    if nodes.hostfile is not None:
        found = target_of(Request(launcher="deepspeed", hostfile=request.hostfile)) or found
    return found if request.port is None else replace(found, port=request.port)


def rendered(plan: Plan, job: Job, target: Target) -> tuple[dict[str, str], WorkerFile]:
    """The files of a plan by name, and what the worker is told in one of them."""
    files = render_plan(plan, target, job)
    return files, worker_file(files[WORKER_FILE], WORKER_FILE)


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
    needed += ["deepspeed"] if engine is None or engine in STAGES else []
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
            name = checkpoints.folder_of(path, checkpoints.read_manifest(path).step).name
        except checkpoints.Torn:
            name = text("cli.step-number-step")
        raise ConfigError(Message("cli.checkpoint-under-another", path=path, path2=name))
    if (path / MANIFEST).is_file() or written_first(path) is not None:
        return path
    if (states := checkpoints.states_folder(path)) is not None:
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


# --- the course of a run -------------------------------------------------------------------------


class FoundPlan(NamedTuple):
    """A plan that may be the next one, and what it steps down from."""

    plan: Plan
    bounds: Bounds  # with what the failed attempt has measured
    tried: Tried | None = None
    entry: Entry | None = None  # that measurement, for later plans


@dataclass(kw_only=True)
class TrainCourse:
    """What `tightfit train` brings to its supervisor: how the training is computed at present, and how else it could
    be. Changes when the supervisor takes another plan."""

    request: Request
    ready: Ready
    folder: RunFolder  # where this node keeps plan and logs
    options: tuple[str, ...]  # of the worker, in all attempts
    worker: tuple[str, ...]  # what starts one rank
    meet: Callable[[Ready], Meeting]  # writes down what a plan takes of this machine, and says where its ranks meet
    patient: bool  # whether to wait for as long as others hold the GPUs
    leader: Leader | None = None  # where the ranks of other nodes are started from here
    bounds: Bounds = field(default_factory=Bounds)
    """What the next plan is searched within, with all that attempts have measured so far."""

    def __post_init__(self) -> None:
        self._target = target_of_run(self.request, self.ready.nodes)
        if self.ready.plan is not None:
            self._set_bounds(self.ready.plan)
        self._tried: list[Tried] = []
        self._orders: Orders | None = None
        self._found: FoundPlan | None = None

    def _set_bounds(self, plan: Plan) -> None:
        bounds = bounds_of(plan.job, self._target, calibration_of(self.request, plan.job))
        self.bounds = replace(bounds, every_gpu=self.ready.nodes.count > 1)

    def _last(self, otherwise: str) -> Plan | Refused:
        """What ran last. A plan that was written before is read back when it is needed; `otherwise`: what to type."""
        if self.ready.plan is not None:
            return self.ready.plan
        try:
            plan = read_written_plan(self.folder.plan)
        except UserError as error:
            return Refused(because=f"{error}: {otherwise}")
        self._set_bounds(plan)
        self.ready = replace(self.ready, plan=plan)
        return plan

    @property
    def words(self) -> str:
        known = config_of_plan(self.folder.plan)
        plan = self.ready.plan
        way = self.ready.worker.engine if plan is None or plan.chosen is None else strategy_name(plan.chosen.levers)
        batch = {"micro_batch": known.micro_batch, "accumulation": known.accumulation}
        return text("cli.micro-batch-2", way=way, **batch, ranks=self.ranks)

    @property
    def ranks(self) -> int:
        return self.ready.worker.ranks

    @property
    def worker_file(self) -> WorkerFile:
        return self.ready.worker

    @property
    def orders(self) -> Orders:
        assert self._orders is not None, "they are made with the starts"
        return self._orders

    @property
    def effective_batch(self) -> int | None:
        known = config_of_plan(self.folder.plan)
        if known.micro_batch is None or known.accumulation is None:
            return None
        return known.micro_batch * known.accumulation * self.ranks

    @property
    def precision(self) -> str:
        return config_of_plan(self.folder.plan).precision or ""

    def starts(self, options: Sequence[str]) -> Sequence[RankStart]:
        every = (*self.options, *options)
        if self.leader is None:
            return self._start_here(self.meet(self.ready), every)
        meeting = replace(self.meet(self.ready), interface=self.leader.interface)
        self._orders = Orders(files=self.ready.files, options=every, port=meeting.port)
        return [*self._start_here(meeting, every), *starts_elsewhere(self.ready.worker, self.folder)]

    def follow(self, order: wire.Start, interface: str | None) -> Sequence[RankStart]:
        """The ranks of this node, as the leader of several has ordered them."""
        worker = worker_file(order.files[WORKER_FILE], WORKER_FILE)
        write(order.files, self.folder.plan, force=True)
        devices, nodes = self.ready.devices[: worker.gpus_per_node], replace(self.ready.nodes, port=order.port)
        self.ready = replace(self.ready, files=order.files, worker=worker, devices=devices, nodes=nodes)
        return self._start_here(replace(self.meet(self.ready), interface=interface), order.options)

    def _start_here(self, meeting: Meeting, options: Sequence[str]) -> Sequence[RankStart]:
        if self.ready.nodes.hostfile is not None:
            return [launcher_start(self.folder, meeting, options)]
        devices = self.ready.devices
        words = None if not devices else tuple(device.word for device in devices)
        others = taken_gpus(reservations().live()).keys() - {device.key for device in devices}
        sight = Sight(variable=self.ready.occupancy.variable, words=words, others=len(others))
        command = worker_command(self.folder, options, self.worker)
        return rank_starts(self.ready.worker, meeting, sight, self.folder, command)

    def learn(self, outcome: Outcome) -> None:
        self.bounds = learn(self.ready.plan, outcome.tally, self.bounds)

    def smaller(self, shortfall: Shortfall, verdict: Verdict) -> Changed | Refused:
        last = self._last(text("cli.plan-again-less"))
        if isinstance(last, Refused):
            return last
        before = last.chosen
        assert before is not None, "what has no way was never started"
        shortfall = locate(shortfall, before)
        bounds, entry, numbers, known = self.bounds, None, verdict.oom, self.bounds.calibration
        if known is not None and numbers is not None and numbers.allocated is not None and numbers.asked is not None:
            # What was held and asked for when it failed was needed, at the least.
            entry = learn_from_failure(last, shortfall, numbers.allocated + numbers.asked)
            bounds = replace(bounds, calibration=known.after_failure(entry))
        found = step_down(last, shortfall, bounds=bounds, before=tuple(self._tried))
        if isinstance(found, NoWay) and shortfall.phase is not None:
            # Less at the highest peak leaves more in one piece, also for a phase that no lever makes smaller.
            whole = replace(shortfall, phase=None)
            elsewhere = step_down(last, whole, bounds=bounds, before=tuple(self._tried))
            found, shortfall = (found, shortfall) if isinstance(elsewhere, NoWay) else (elsewhere, whole)
        if isinstance(found, NoWay):
            held = phase_bytes(before.footprint, "gpu", shortfall.phase, before.hardware)
            puzzling = shortfall.where == "gpu" and held < before.gpu_limit_bytes // 2
            because = Message("runs.several", parts=Listing(found.because, "."))
            return Refused(because=because, puzzling=puzzling)
        tried = Tried(way=before, shortfall=shortfall)
        self._found = FoundPlan(found.plan, bounds, tried, entry)
        after = found.plan.chosen
        assert after is not None
        old, new = before.levers, after.levers
        reasons = [said for said in found.because if said.id != "plan.what-changes"]
        return Changed(
            because=Message("runs.several", parts=Listing(reasons, ".")),
            changed=tuple(found.changed),
            another_job=after.changes != before.changes,
            carries=(old.method, old.lora, old.optimizer) == (new.method, new.lora, new.optimizer)
            and before.shape == after.shape,
        )

    def in_bf16(self) -> Changed | Refused:
        last = self._last(text("cli.plan-again-tightfit"))
        if isinstance(last, Refused):
            return last
        assert last.chosen is not None, "what has no way was never started"
        if native_bf16(last.hardware.gpu.arch) is False:
            return Refused(because=text("cli.bf16-own-use", name=last.hardware.gpu.name))
        job = replace(last.job, precision="bf16", effective_batch=last.effective_batch)
        found = plan_within(self.bounds, job, last.shape, last.hardware)
        if found.chosen is None:
            return Refused(because=text("cli.plan-bf16-fits"))
        self._found = FoundPlan(found, self.bounds)
        changed = ("precision fp16 → bf16", *lever_changes(last.chosen, found.chosen))
        return Changed(because=text("cli.fp16-overflowed-bf16"), changed=changed, another_job=True)

    def take(self) -> None:
        found = self._found
        assert found is not None
        files, worker = rendered(found.plan, found.plan.job, self._target)
        write(files, self.folder.plan, force=True)
        devices = self.ready.devices[: worker.gpus_per_node]
        self.ready = replace(self.ready, plan=found.plan, files=files, worker=worker, devices=devices)
        self._tried += [] if found.tried is None else [found.tried]
        self.bounds = found.bounds
        if found.entry is not None:
            Calibrations(cache_folder()).add(found.entry)

    def wait_for_room(self, say: Callable[[Said], None], give_up: Callable[[], bool]) -> Refused | None:
        """Nobody is asked to end anything: it is said who holds the memory."""
        began, patient = time.monotonic(), self.patient

        def look() -> bool:
            ours = {device.key for device in self.ready.devices}
            for device in occupancy().devices if ours else ():
                if device.key in ours:
                    check_free(device, self.ready.worker)
            return True

        if wait_while_busy(look, say, lambda: give_up() or (not patient and time.monotonic() - began > WAITS_S)):
            return None
        try:
            look()
        except Busy as error:
            return Refused(because=error.said)
        return None


def learn(plan: Plan | None, tally: Tally, bounds: Bounds) -> Bounds:
    """Write down what an attempt measured, and hand back the bounds that know it; unchanged with `--no-calibration`."""
    if plan is None or bounds.calibration is None:
        return bounds
    entry = learned((*tally.marks, *([tally.last] if tally.last else ())), plan)
    timed = learn_seconds(tally, plan, bounds.calibration.processor)
    Calibrations(cache_folder()).add(entry, timed)
    return replace(bounds, calibration=bounds.calibration.with_entry(entry).with_timed(timed))


def way_up(plan: Plan | None, tally: Tally, bounds: Bounds) -> Plan | None:
    """The faster plan that would fit, where the run left much of its cards unused; `bounds`: after `learn`.

    Its first `because` is the sentence to say.
    """
    peaks = [mark.measured_bytes for mark in tally.marks if mark.measured_bytes is not None]
    peak = max((*peaks, tally.peak_bytes or 0))
    return None if plan is None or not peak else room_above(plan, peak, bounds=bounds)
