"""One rank that goes on from several checkpoints, one after another, with one engine.

For each it loads the checkpoint, saves it again at once under OUT/NAME/, and takes one more step. Rank 0 leaves the
losses of these steps in OUT/losses.json.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.runs.checkpoints import Keeping, read_state
from tightfit.train import place as places
from tightfit.train.assemble import assemble
from tightfit.train.checkpoint import Saver, model_set
from tightfit.train.config import Options, read_worker_config
from tightfit.train.data.order import Order
from tightfit.train.data.tokens import pad_id
from tightfit.train.events import Events
from tightfit.train.loop import Loop, Windows
from tightfit.train.nodes import NodeDisks
from tightfit.train.resume import CheckpointFiles, load
from tightfit.train.resume import FoundCheckpoint as Checkpoint
from tightfit.train.sources import open_weights
from tightfit.train.stop import Stop, leave
from tightfit.train.worker import Worker


def go_on(plan: Path, out: Path, *folders: Path) -> None:
    config = read_worker_config(plan / "worker.json")
    place = places.place_of(os.environ, config, Options())
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "tightfit"
    events = Events(out, speaks=False)
    worker = Worker(config=config, options=Options(), place=place, cache=cache, events=events, stop=Stop())
    store = places.rendezvous(place)
    prepared = worker.prepare(store)
    places.join(place, store)
    if config.levers.uses_deepspeed:
        from tightfit.train.engines.deepspeed import join

        join(place)
    made = assemble(config, place, events, None, None, cache)
    nodes = NodeDisks.together(place)
    model = model_set(made, config, prepared.tokenizer, nodes)
    order = Order(len(prepared.split.train), config.effective_batch, config.training.seed)
    windows = partial(Windows, order=order, levers=config.levers, place=place, pad_id=pad_id(prepared.tokenizer))
    losses: dict[str, float | None] = {}
    for folder in folders:
        name = folder.parents[2].name  # NAME/run/checkpoints/step-…
        state: dict[str, Any] = read_state(folder)
        found = Checkpoint(folder=folder, step=state["step"], state=state)
        made.engine.counters()  # once the step before is wholly made, on the host too
        load(found, made.engine, open_weights(folder, made.twin), CheckpointFiles(folder), place, filled=False)
        saver = Saver(
            out / name,
            made.engine,
            model,
            place,
            Keeping(last=9),
            background=False,
            nodes=nodes,
            ranks_here=place.world,
            masters=True,
        )
        saver.save(found.step, state, events)
        assert saver.last == found.step
        loop = Loop(
            config=config,
            engine=made.engine,
            windows=windows(prepared.split.train),
            held=None,
            events=events,
            place=place,
            steps=found.step + 1,
            stop=Stop(),
            saver=None,
            standing=lambda _: {},
        )
        loop.run(found.step)
        losses[name] = loop.last_loss
    if place.leads:
        (out / "losses.json").write_text(json.dumps(losses))
    places.part(place)
    leave(0)
