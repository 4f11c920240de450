"""One rank of a training, from its orders to the saved model."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tightfit.inputs.surroundings import inherited
from tightfit.messages import Listing, Message, Said, say_why
from tightfit.runs import build_lock
from tightfit.runs.checkpoints import Keeping, states_folder
from tightfit.runs.folder import AUTO, NONE
from tightfit.runs.free_ram import check_free_ram
from tightfit.runs.lock import FolderLock, InUse
from tightfit.train import nvme, resume
from tightfit.train import place as places
from tightfit.train.assemble import Assembled, TensorSource, assemble
from tightfit.train.build import hf_config
from tightfit.train.checkpoint import Saver, model_set
from tightfit.train.config import Options, WorkerConfig
from tightfit.train.data.order import Order
from tightfit.train.data.samples import Split, explain, open_samples, prepare, worst
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import load_tokenizer, pad_id
from tightfit.train.deepspeed_checkpoint import open_deepspeed
from tightfit.train.engines import Diverged
from tightfit.train.events import FULL, Events, RankHeartbeat, lines_of, watchers
from tightfit.train.host_memory import NotLocked
from tightfit.train.loop import Ending, Loop, Windows
from tightfit.train.nodes import NodeDisks, find_nodes
from tightfit.train.parts import write_on_first
from tightfit.train.place import Place
from tightfit.train.probe import Milestones, PlanProof, probe, proofs, recomputation
from tightfit.train.reach import check_reach
from tightfit.train.resume import FoundCheckpoint
from tightfit.train.sources import open_weights
from tightfit.train.sources_hub import find_weights
from tightfit.train.stop import Stop
from tightfit.types import ConfigError, HardwareError, TightfitError

EVERYBODY = "prepared"  # the key under which all ranks are told that data and weights are there
MODEL = "model"  # the folder of the trained model, in the run's


class OthersFailed(TightfitError):
    """The rank that prepares for this one has said why it ended; there is nothing to add."""


class NotAsPlanned(TightfitError):
    """The engine does not do what the plan says."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    weights: Path | None
    hf_config: Any
    tokenizer: Any
    split: Split
    said: tuple[Said, ...]


def run(
    config: WorkerConfig, options: Options, place: Place, cache: Path, stop: Stop, heartbeat: RankHeartbeat
) -> Ending:
    """Train, and leave with everybody else; how it ended."""
    with ExitStack() as leaving:
        if place.leads and not options.rehearse and place.launcher != "tightfit":  # or the desk holds the run's folder
            try:
                config.folder.mkdir(parents=True, exist_ok=True)
                leaving.callback(FolderLock.take(config.folder, place.job).release)
                check_free_ram(config.levers.engine, config.predicted.host_bytes_per_rank * place.world)
            except (InUse, OSError, HardwareError) as error:
                if place.world > 1:
                    _call_off(places.rendezvous(place))
                if isinstance(error, OSError) and error.errno not in FULL:
                    why = say_why(error)
                    raise ConfigError(Message("train.folder-unwritable", folder=config.folder, why=why)) from None
                raise
        lines = lines_of(place, config.predicted.peak_bytes, config.logging_steps)
        with closing(Events(config.folder, speaks=place.leads, lines=lines, heartbeat=heartbeat)) as events:
            worker = Worker(config=config, options=options, place=place, cache=cache, events=events, stop=stop)
            try:
                ending = worker.run()
            except NotLocked as error:  # which knows no more than what was asked for until then
                needed = max(config.predicted.host_bytes_per_rank, error.needed_bytes)
                raise NotLocked(error.locked_bytes, needed, may_stay=config.levers.method != "full") from None
            heartbeat.at("end")
        places.part(place)
        return ending


def data_spec(config: WorkerConfig, model_type: str) -> DataSpec:
    return DataSpec(
        **config.data,
        evaluation_split=config.evaluation.split,
        sequence=config.levers.sequence,
        seed=config.training.seed,
        model_type=model_type,
        scan=config.levers.scan,
    )


@dataclass(kw_only=True)
class Worker:
    """What every stage of a run needs to know."""

    config: WorkerConfig
    options: Options
    place: Place
    cache: Path
    events: Events
    stop: Stop
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Ending:
        if (self.config.folder / MODEL).exists() and not self.options.rehearse:
            raise ConfigError(Message("train.run-finished", folder=self.config.folder))
        levers, predicted = self.config.levers, self.config.predicted
        swapping = self.config.deepspeed if nvme.on_nvme(levers) else None
        here = 1 if self.options.rehearse else self.config.world.gpus_per_node
        file_bytes = predicted.nvme_bytes_per_node // self.config.world.gpus_per_node * here
        if levers.streams and nvme.on_nvme(levers):
            assert self.config.nvme_path is not None
            nvme.check_folder(self.config.nvme_path, file_bytes)
        if swapping is not None:
            trained = predicted.trainable_parameters // self.place.world
            nvme.check(swapping, self.place.rank, trained=trained, world=self.place.world, file_bytes=file_bytes)
        self.events.write(
            "start",
            model=self.config.model.name,
            **{name: getattr(levers, name) for name in ("method", "engine", "precision", "sequence")},
            world=self.place.world,
            launcher=self.place.launcher,
            device=self.place.device.type,
            rehearsal=self.options.rehearse,
            host=platform.node(),
            effective_batch=self.config.effective_batch,
            versions=_versions(),
            predicted={
                name: getattr(predicted, name)
                for name in ("peak_bytes", "limit_bytes", "phases", "host_bytes_per_rank", "step_s", "tokens_per_s")
            },
        )
        if self.place.leads:
            facts = {"model": self.config.model.name, "engine": levers.engine, "world": self.place.world}
            wanted = self.options.tensorboard, self.options.wandb
            self.events.watcher = watchers(self.config.folder, *wanted, facts, self.config.logging_steps)
        store = places.rendezvous(self.place)
        prepared = self.prepare(store)
        self.events.heartbeat.at("init")
        places.join(self.place, store)
        ending = self.train(prepared)
        if swapping is not None:
            nvme.discard(swapping, self.place.rank)
        return ending

    def prepare(self, store: Any) -> Prepared:
        """One rank a node fetches and tokenises; the others wait, and open what it made. Then all wait for all: a group
        would not have the patience for a node that downloads longer than the others."""
        try:
            if self.config.world.nodes > 1 and not self.place.is_alone:
                check_reach(store, self.place, inherited({}))
            if self.place.local_rank > 0:
                _wait_for(store, _node())
            source, weights = self.config.model, None
            if source.weights is not None:
                weights = find_weights(source.weights, progress=self.events.report)
            hf = hf_config(source, weights)
            named = self.config.data.get("tokenizer") or (str(weights) if weights is not None else None)
            tokenizer = load_tokenizer(named, hf.vocab_size, trust_remote_code=source.trust_remote_code)
            spec = data_spec(self.config, hf.model_type)
            prepare(spec, tokenizer, self.cache / "data", self.events.progress(Message("train.reading-data")))
            split = open_samples(spec, tokenizer, self.cache / "data")
            made = Prepared(
                weights=weights, hf_config=hf, tokenizer=tokenizer, split=split, said=explain(spec, tokenizer)
            )
        except Exception as error:
            if not isinstance(error, OthersFailed):
                _call_off(store)
            raise
        if self.place.local_rank == 0:
            store.set(_node(), "done")
        if self.place.rehearsal:
            return made
        if store.add("prepared-ranks", 1) == self.place.world:
            store.set(EVERYBODY, "done")
        _wait_for(store, EVERYBODY)
        return made

    def train(self, prepared: Prepared) -> Ending:
        config, place = self.config, self.place
        if self.options.cap_bytes is not None:
            places.cap(place, self.options.cap_bytes)
        places.restart_peaks(place.device)
        samples, held = prepared.split.train, prepared.split.held
        job = resume.job_of(config, prepared.hf_config, samples)
        order = Order(len(samples), config.effective_batch, config.training.seed)
        steps = config.training.max_steps or max(1, order.steps_in(config.training.epochs or 1))
        if self.options.rehearse:
            steps = self.options.rehearse_steps
        nodes = NodeDisks.together(place) if self.options.rehearse else find_nodes(config.folder, place)
        found = self._find_checkpoint(job, steps, nodes)
        made = self.assemble(prepared, found)
        milestones = Milestones(self.events, config.predicted, place)
        milestones.measure("init")
        self._prove(*proofs(config, place, made.engine.holdings()))
        if nodes.are_apart:
            hosts = Listing(nodes.hosts, "and")
            self.events.write("warning", text=Message("train.checkpoints-in-parts", hosts=hosts))
        for sentence in (*prepared.said, *(each for _, each in places.gather_messages(place, made.said))):
            self.events.write("warning", text=sentence)
        pad, compiler = pad_id(prepared.tokenizer), made.compiler
        dealt = partial(Windows, order=order, levers=config.levers, place=place, pad_id=pad, compiler=compiler)
        windows = dealt(samples)
        if self.options.probe:
            largest = windows.of(worst(samples, config.effective_batch))
            seconds, peak_bytes, recomputed = probe(made.engine, windows, largest, milestones, place)
            self.events.write("probe", seconds=round(seconds, 3), peak_bytes=peak_bytes)
            self._prove(recomputation(made.recomputed, recomputed, made.within))
        made.engine.expect(steps)
        if found is not None:
            self._load(found, made)
        model = model_set(made, config, prepared.tokenizer, nodes)
        saver, orders = None, config.saving
        if not self.options.rehearse:
            on_the_way = orders.every_minutes is not None or (orders.every_steps or steps) < steps
            saver = Saver(
                run=config.folder,
                engine=made.engine,
                model=model,
                place=place,
                keeping=Keeping(last=orders.keep_last, every_steps=orders.keep_every),
                background=orders.async_save and on_the_way and not nvme.on_nvme(config.levers),
                ranks_here=config.world.gpus_per_node,
                masters=config.levers.precision != "fp32" and config.levers.master_weights,
                nodes=nodes,
            )
        loop = Loop(
            config=config,
            engine=made.engine,
            windows=windows,
            held=None if held is None else dealt(held),
            events=self.events,
            place=place,
            steps=steps,
            stop=self.stop,
            saver=saver,
            standing=lambda done: resume.describe_state(config, job, made.engine.counters(), done, _versions()),
            skips=self.options.skip_steps,
            compiler=compiler,
        )
        gc.collect()
        gc.freeze()  # what is there now stays to the end: it need not be looked through again and again
        if saver is not None:
            self.stop.arm()
        try:
            ending = loop.run(0 if found is None else found.step)
        except Diverged:  # on all ranks alike, and a checkpoint that is being written is wanted now more than ever
            if saver is not None:
                saver.wait(self.events)
            raise
        if saver is not None:
            saver.wait(self.events)
        if ending == "finished" and not self.options.rehearse:
            self.events.heartbeat.at("save")
            began, folder = time.monotonic(), config.folder / MODEL
            written = write_on_first(folder, model, place, nodes)
            seconds = round(time.monotonic() - began, 3)
            files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            self.events.write("saved", folder=str(folder), bytes=written, seconds=seconds, files=files)
        self._say_end(ending, loop, milestones)
        return ending

    def _find_checkpoint(self, job: dict[str, Any], steps: int, nodes: NodeDisks) -> FoundCheckpoint | None:
        """The checkpoint to go on from, if this job of so many steps may. Nothing is said of one that is refused."""
        if self.options.rehearse:
            return None
        run, wanted = self.config.folder, self.options.resume
        if wanted not in (AUTO, NONE) and (folder := states_folder(Path(wanted))) is not None:
            return self._find_deepspeed_checkpoint(folder, nodes)
        found = resume.choose(run, wanted, self.place, nodes, self.events)
        if found is None:
            resume.make_way(run, None, wanted, nodes)
            return None
        if found.step > steps:
            raise ConfigError(Message("train.past-the-end", folder=found.folder, step=found.step, steps=steps))
        changed = resume.differences(found.state["job"], job)
        if changed and not self.options.resume_anyway:
            raise ConfigError(Message("train.another-job", folder=found.folder, changed=Listing(changed, ";")))
        resume.make_way(run, found, wanted, nodes)
        plan = found.state["plan"]
        self.events.write(
            "resumed",
            step=found.step,
            folder=str(found.folder),
            from_engine=plan["engine"],
            from_world=plan["world"],
            changed=[*changed, *resume.schedule_differences(found.state["schedule"], self.config)],
        )
        return found

    def _find_deepspeed_checkpoint(self, folder: Path, nodes: NodeDisks) -> FoundCheckpoint:
        """A checkpoint of another program, from which this job goes on as far as it can."""
        resume.clear(self.config.folder, self.place, nodes)
        opened = open_deepspeed(folder, trust_pickle=self.options.trust_pickle)
        lacking = opened.missing_for(self.config.levers.optimizer, self.config.predicted.trainable_parameters)
        scale = None if lacking or opened.scale is None else asdict(opened.scale)
        state = {"optimizer": {"steps": 0 if lacking else opened.optimizer_steps}, "loss_scale": scale}
        alone, step = lacking is not None, 0 if lacking else opened.step
        found = FoundCheckpoint(folder=folder, step=step, state=state, deepspeed=opened, weights_alone=alone)
        resume.make_way(self.config.folder, found, self.options.resume, nodes)
        if lacking is not None:
            self.events.write("warning", text=Message("train.weights-alone", folder=folder, lacking=lacking))
            return found
        then, now = opened.effective_batch, self.config.effective_batch
        self.events.write(
            "resumed",
            step=found.step,
            folder=str(folder),
            from_engine=f"zero{opened.stage}",
            from_world=opened.world,
            changed=[Message("train.batch-changed", then=then, now=now)] if then not in (None, now) else [],
        )
        self.events.write("warning", text=Message("train.deepspeed-resumed", step=found.step))
        return found

    def _load(self, found: FoundCheckpoint, made: Assembled) -> None:
        """Afterwards nothing of the checkpoint's files is held open, or removing it would free no room."""
        self.events.doing(Message("train.loading-checkpoint"))
        whole = self.config.levers.lora is None
        weights: TensorSource
        states: resume.StoredStates
        if found.deepspeed is not None:
            weights = states = found.deepspeed.name_for(made.twin, adapters=not whole)
        else:
            states = resume.CheckpointFiles(found.folder, found.files)
            weights = open_weights(found.folder, made.twin, files=found.files) if whole else states
        lost = resume.load(found, made.engine, weights, states, self.place, filled=whole)
        if found.files is not None:
            found.files.finish()
        if lost is not None:
            self.events.write("warning", text=lost)
        self.events.report(Message("train.loading-checkpoint"), 1, 1)

    def assemble(self, prepared: Prepared, found: FoundCheckpoint | None) -> Assembled:
        if self.config.levers.uses_deepspeed:
            from tightfit.train.engines.deepspeed import join, report_meanwhile

            if self.place.leads:
                for text in build_lock.clear(inherited({})):
                    self.events.write("warning", text=text)
            with report_meanwhile(Message("train.loading-deepspeed"), self.events.doing):
                join(self.place)
                if nvme.on_nvme(self.config.levers):
                    nvme.load()
        if self.config.levers.lora is not None:
            found = None  # an adapter's checkpoint holds no base
        checkpoint, files = (None, None) if found is None else (found.deepspeed or found.folder, found.files)
        cache = self.cache / "weights"
        return assemble(self.config, self.place, self.events, prepared.weights, checkpoint, cache, files)

    def _prove(self, *found: PlanProof) -> None:
        for name, ok, text in found:
            self.events.write("proof", name=name, ok=ok, text=text)
            if not ok:
                raise NotAsPlanned(Message("train.not-as-planned", proof=text))

    def _say_end(self, ending: str, loop: Loop, milestones: Milestones) -> None:
        reading, predicted = places.read_memory(self.place), self.config.predicted
        peaks = places.everyone(self.place, reading.peak_bytes or 0)
        seconds = round(time.monotonic() - self.began, 3)
        if self.place.leads and not self.options.rehearse:
            from tightfit.train.pictures import draw

            if drawn := draw(self.config.folder):
                self.events.write("pictures", files=[str(path) for path in drawn])
        self.events.write(
            "end",
            reason=ending,
            summary={
                "steps": loop.made,
                "first_loss": loop.first_loss,
                "last_loss": loop.last_loss,
                "seconds": seconds,
                "median_step_s": statistics.median(loop.step_seconds) if loop.step_seconds else None,
                "tokens_per_s": loop.tokens_per_s,
                "peak_bytes": reading.peak_bytes,
                "rank_peak_bytes": peaks if reading.peak_bytes is not None else None,
                "host_peak_bytes": reading.host_peak_bytes,
                "milestones": dict(milestones.measured),
                "predicted": {
                    name: getattr(predicted, name)
                    for name in ("peak_bytes", "step_s", "tokens_per_s", "host_bytes_per_rank")
                },
            },
        )


def _node() -> str:
    """The key under which the ranks of this machine are told: SLURM may deal ranks to nodes in any order."""
    return f"{EVERYBODY}-{platform.node()}"


def _call_off(store: Any) -> None:
    """Whoever waits for this rank need not any more."""
    store.set(_node(), "failed")
    store.set(EVERYBODY, "failed")
    time.sleep(0.3)  # the store may end with this process; the others read it first


def _wait_for(store: Any, key: str) -> None:
    """Wait for what another rank has to say."""
    store.wait([key], places.PATIENCE)
    if store.get(key) == b"failed":
        raise OthersFailed


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "deepspeed", "peft", "accelerate", "tightfit"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
