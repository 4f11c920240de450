"""One rank of a training, from its orders to the saved model."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tightfit.train import place as places
from tightfit.train.assemble import Assembled, assemble
from tightfit.train.build import hf_config
from tightfit.train.config import Options, WorkerConfig
from tightfit.train.data import DataSpec, Order, Split, load_tokenizer, open_samples, pad_id, prepare, worst
from tightfit.train.events import Events
from tightfit.train.finish import save_model
from tightfit.train.loop import Loop, steps_of
from tightfit.train.meter import Meter
from tightfit.train.place import Place
from tightfit.train.probe import Milestones, probe
from tightfit.train.proof import Proof, proofs, recomputation
from tightfit.train.sources import find_weights
from tightfit.train.windows import Windows, seed_everything
from tightfit.types import TightfitError, UserError

MODEL = "model"
"""The folder of the trained model, in the run's."""


class OthersFailed(TightfitError):
    """The rank that prepares for this one has said why it ended; there is nothing to add."""


class NotAsPlanned(TightfitError):
    """The engine does not do what the plan says."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    weights: Path | None
    tokenizer: Any
    split: Split


def run(config: WorkerConfig, options: Options, place: Place, cache: Path) -> None:
    """Train, and leave with everybody else."""
    events = Events(config.folder, speaks=place.leads)
    began = time.monotonic()
    _say_start(config, options, place, events)
    store = places.rendezvous(place)
    prepared = _prepared(config, place, store, cache, events)
    places.join(place, store)
    try:
        _train(config, options, place, prepared, cache, events, began)
    finally:
        events.close()
    places.part(place)


def _say_start(config: WorkerConfig, options: Options, place: Place, events: Events) -> None:
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "peft", "accelerate", "tightfit"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    levers = config.levers
    events.write(
        "start",
        model=config.model.name,
        method=levers.method,
        engine=levers.engine,
        precision=levers.precision,
        world=place.world,
        launcher=place.launcher,
        device=place.device.type,
        rehearsal=options.rehearse,
        host=platform.node(),
        effective_batch=config.effective_batch,
        sequence=levers.sequence,
        versions=versions,
        predicted={
            "peak_bytes": config.predicted.peak_bytes,
            "limit_bytes": config.predicted.limit_bytes,
            "phases": dict(config.predicted.phases),
            "host_bytes_per_rank": config.predicted.host_bytes_per_rank,
            "step_s": config.predicted.step_s,
            "tokens_per_s": config.predicted.tokens_per_s,
        },
    )


# --- data and weights ---------------------------------------------------------------------------


def _prepared(config: WorkerConfig, place: Place, store: Any, cache: Path, events: Events) -> Prepared:
    """One rank a node fetches and tokenises; the others wait, and open what it made."""
    key = f"prepared-{place.rank - place.local_rank}"
    if place.local_rank == 0:
        try:
            made = _prepare(config, cache, events)
        except Exception:
            store.set(key, "failed")
            time.sleep(0.3)  # the store may end with this process; the others read it first
            raise
        store.set(key, "done")
        return made
    store.wait([key], places.PATIENCE)
    if store.get(key) == b"failed":
        raise OthersFailed
    return _prepare(config, cache, events)


def _prepare(config: WorkerConfig, cache: Path, events: Events) -> Prepared:
    weights = None
    if config.model.weights is not None:
        weights = find_weights(config.model.weights, progress=events.told)
    hf = hf_config(config.model, weights)
    named = config.data.get("tokenizer") or (str(weights) if weights is not None else None)
    tokenizer = load_tokenizer(named, hf.vocab_size, trust_remote_code=config.model.trust_remote_code)
    spec = data_spec(config, hf.model_type)
    told = events.progress("data")
    prepare(spec, tokenizer, cache / "data", told)
    return Prepared(weights=weights, tokenizer=tokenizer, split=open_samples(spec, tokenizer, cache / "data"))


def data_spec(config: WorkerConfig, model_type: str) -> DataSpec:
    return DataSpec(
        **config.data,
        evaluation_split=config.evaluation_split,
        sequence=config.levers.sequence,
        seed=config.training.seed,
        model_type=model_type,
    )


# --- training -----------------------------------------------------------------------------------


def _train(
    config: WorkerConfig,
    options: Options,
    place: Place,
    prepared: Prepared,
    cache: Path,
    events: Events,
    began: float,
) -> None:
    if options.cap_bytes is not None:
        places.cap(place, options.cap_bytes)
    if config.levers.engine != "fsdp2":
        from tightfit.train.engines.deepspeed import join

        join(place)
    meter = Meter(place.device)
    meter.restart()
    seed_everything(config.training.seed, place)
    made = assemble(config, place, prepared.weights, cache / "weights", events)
    milestones = Milestones(events, meter, config.predicted, place)
    milestones.reached("init")
    _prove(proofs(config, place, made.engine.held()), events)
    for said in (*made.said, *(f"dtype repaired: {odd}" for odd in made.oddities)):
        events.write("warning", text=said)
    samples, held = prepared.split.train, prepared.split.held
    pad = pad_id(prepared.tokenizer)
    order = Order(len(samples), config.effective_batch, config.training.seed)
    windows = Windows(samples, order, config.levers, place, pad)
    seed_everything(config.training.seed, place)
    if options.probe:
        _probe(config, made, windows, samples, milestones, place, events)
    steps = (
        options.rehearse_steps if options.rehearse else steps_of(config, order.steps_in(config.training.epochs or 1))
    )
    loop = Loop(
        config=config,
        engine=made.engine,
        windows=windows,
        held=None if held is None else (held, Windows(held, order, config.levers, place, pad)),
        events=events,
        meter=meter,
        place=place,
        samples=len(samples),
        steps=steps,
    )
    ending = loop.run()
    if not options.rehearse:
        _save(config, made, prepared.tokenizer, place, events)
    _say_end(ending, loop, milestones, time.monotonic() - began, events)


def _prove(found: Any, events: Events) -> None:
    for proof in found:
        assert isinstance(proof, Proof)
        events.write("proof", name=proof.name, ok=proof.ok, text=proof.text)
        if not proof.ok:
            raise NotAsPlanned(f"the plan is not what runs: {proof.text}")


def _probe(
    config: WorkerConfig,
    made: Assembled,
    windows: Windows,
    samples: Any,
    milestones: Milestones,
    place: Place,
    events: Events,
) -> None:
    if "nvme" in (config.levers.offload_optimizer, config.levers.offload_param):
        events.write("warning", text="the largest batch was not tried first: what lies on NVMe cannot be set back")
        return
    largest = windows.of(worst(samples, config.effective_batch))
    found = probe(made.engine, windows, largest, milestones, place)
    events.write("probe", seconds=round(found.seconds, 3), peak_bytes=found.peak_bytes)
    micro_batches = 1
    _prove([recomputation(made.recomputed * micro_batches, found.recomputed_layers)], events)


def _save(config: WorkerConfig, made: Assembled, tokenizer: Any, place: Place, events: Events) -> None:
    began = time.monotonic()
    folder = config.folder / MODEL
    written = save_model(folder, made, config, tokenizer, place)
    events.write("saved", folder=str(folder), bytes=written, seconds=round(time.monotonic() - began, 3))


def _say_end(ending: str, loop: Loop, milestones: Milestones, seconds: float, events: Events) -> None:
    reading = loop.meter.read()
    ordered = sorted(loop.step_seconds)
    predicted = loop.config.predicted
    events.write(
        "end",
        reason=ending,
        summary={
            "steps": len(loop.step_seconds),
            "first_loss": loop.first_loss,
            "last_loss": loop.last_loss,
            "seconds": round(seconds, 3),
            "median_step_s": ordered[len(ordered) // 2] if ordered else None,
            "tokens_per_s": loop.tokens_per_s,
            "peak_bytes": reading.peak_bytes,
            "host_peak_bytes": reading.host_peak_bytes,
            "milestones": dict(milestones.measured),
            "predicted": {
                "peak_bytes": predicted.peak_bytes,
                "step_s": predicted.step_s,
                "tokens_per_s": predicted.tokens_per_s,
                "host_bytes_per_rank": predicted.host_bytes_per_rank,
            },
        },
    )


__all__ = ["MODEL", "NotAsPlanned", "OthersFailed", "UserError", "run"]
