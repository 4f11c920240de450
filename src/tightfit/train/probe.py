"""Before the first step: what was planned is what runs, and it fits.

Guides say which lines to look for in a log. Here each claim is checked against what this process really holds.

Then the worst batch comes first, so that an out-of-memory comes in the first seconds and not at step 1200: one whole
window of the largest samples that the data has, with its optimizer step, at learning rate zero; then once more, because
the peak often comes when the optimizer's states exist already. Afterwards the engine forgets: moments, counters and
loss scale are set back, and the generators of random numbers too, so that the first real step is bit for bit what it
would have been. Clearing gradients alone would not do: ZeRO-2 keeps some.

On the way the four milestones are measured against the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tightfit.messages import Message
from tightfit.train.build import DTYPES, adapter_dtype, layers_of, rests_in
from tightfit.train.config import Milestone, Prediction, WorkerConfig
from tightfit.train.engines import Engine, HeldHere
from tightfit.train.events import Events
from tightfit.train.loop import Window, Windows
from tightfit.train.place import Place, Reading, everyone, read_memory, restart_peaks

PASSES = 2
MOST_TURNS = 24
"""fp16 may begin with a loss scale that overflows. A skipped step proves nothing; the next one has a lower scale."""
MEBIBYTE = 2**20
ROOM = 0.25
"""Small parameters are not sharded, and parts are padded; a share may be this much above the ideal and is still one."""


PlanProof = tuple[str, bool, Message]  # what was looked at, whether it is so, and a sentence about it


def proofs(config: WorkerConfig, place: Place, held: HeldHere) -> Iterator[PlanProof]:
    """What can be seen before the first batch."""
    levers = config.levers
    world = levers.shards(place.world) * levers.tensor_parallel
    started = {
        "world": place.world,
        "launcher": place.launcher,
        "device": place.device.type,
        "nodes": config.world.nodes,
    }
    yield "world", True, Message("train.ranks-started", **started)
    # An untied head or a layer too many would show here; 4-bit weights are counted by their bytes.
    trained, wanted = held.trainable_elements, config.predicted.trainable_parameters
    yield "parameters", trained == wanted, Message("train.parameters-train", trained=trained, wanted=wanted)
    # A training in another precision than planned computes all the same, and its losses hardly show it.
    words = {dtype: word for word, dtype in DTYPES.items()}
    frozen = words[rests_in(levers, trains=False)]
    trained_in = words[rests_in(levers, trains=True) if levers.lora is None else adapter_dtype(levers)]
    works = trained_in if levers.is_fsdp2 else "fp32" if levers.master_weights else levers.precision
    dtypes = {"trained": held.trained_in, "planned": trained_in, "optimizer": held.optimizer_in, "wanted": works}
    text = Message("train.trained-dtypes", **dtypes)
    if held.frozen_in:
        text = Message("train.frozen-dtypes", frozen=held.frozen_in, planned=frozen, others=text)
    ok = (held.frozen_in or frozen, held.trained_in, held.optimizer_in) == (frozen, trained_in, works)
    yield "precision", ok, text
    if levers.shards_parameters:
        share = held.weight_bytes / max(1, held.whole_weight_bytes)
        small = config.levers.buckets.persistence_threshold * 4 / max(1, held.whole_weight_bytes)
        ok = world == 1 or share <= (1 + ROOM) / world + small
        here, whole = held.weight_bytes / MEBIBYTE, held.whole_weight_bytes / MEBIBYTE
        yield "weights", ok, Message("train.weights-sharded", held=here, whole=whole, share=share)
    if not levers.shards_nothing:
        share = held.state_elements / max(1, held.trainable_elements)
        ok = world == 1 or held.state_elements <= (1 + ROOM) * held.fair_elements + 1e-3 * held.trainable_elements
        here, whole = held.state_elements, held.trainable_elements
        yield "optimizer", ok, Message("train.optimizer-sharded", held=here, whole=whole, share=share)
    if place.on_gpu:
        if levers.offload_optimizer != "none":
            ok = "cuda" not in held.optimizer_on
            yield "offload_optimizer", ok, Message("train.optimizer-place", place=held.optimizer_on)
        if levers.offload_param != "none":
            ok = "cuda" not in held.weights_on
            yield "offload_param", ok, Message("train.weights-place", place=held.weights_on)


def recomputation(wanted: int, seen: int, within: int = 0) -> PlanProof:
    """After the first backward pass: layers that really ran twice. `within`: those that do so inside their compiled
    code, which nobody sees from outside."""
    text = Message("train.layers-recompute", seen=seen, wanted=wanted)
    if wanted == 0:
        text = Message("train.some-recompute", seen=seen) if seen else Message("train.none-recompute")
    if within and not seen:
        text = Message("train.recompute-within", within=within)
    return "checkpointing", seen == wanted, text


class Milestones:
    """Memory at the four moments, told as they come."""

    def __init__(self, events: Events, predicted: Prediction, place: Place) -> None:
        self._events, self._predicted, self._place = events, predicted, place
        self.measured: dict[Milestone, int | None] = {}

    def measure(self, milestone: Milestone, reading: Reading | None = None) -> None:
        """`reading`: what this rank had then; None: it is now."""
        reading = reading or read_memory(self._place)
        peak = self.measured[milestone] = reading.peak_bytes
        ranks = everyone(self._place, reading.host_bytes if peak is None else peak)
        self._events.write(
            "memory",
            milestone=milestone,
            predicted_bytes=self._predicted.milestones[milestone],
            measured_bytes=peak,
            now_bytes=reading.now_bytes,
            host_bytes=reading.host_bytes,
            ranks=ranks,
            where="host" if peak is None else "gpu",
        )


def probe(
    engine: Engine, windows: Windows, window: Window, milestones: Milestones, place: Place
) -> tuple[float, int | None, int]:
    """Run the window at learning rate zero, twice, and forget it. The seconds of the last pass, which a step of this
    size takes; the peak; how many layers ran a second time."""
    on_host, on_gpu = torch.get_rng_state(), torch.cuda.get_rng_state(place.device) if place.on_gpu else None
    restart_peaks(place.device)
    calls: list[None] = []
    # How often layers run shows whether recomputation is really on.
    hooks = [layer.register_forward_pre_hook(lambda *_: calls.append(None)) for layer in layers_of(engine.model)]
    seconds, recomputed, taken = 0.0, 0, 0
    read: dict[Milestone, Reading] = {}
    seen: set[Milestone] = set()

    def note(milestone: Milestone) -> None:
        """Ranks tell each other, which they cannot in the middle of a pipeline."""
        if milestone in seen:
            return
        seen.add(milestone)
        if engine.runs_in_step:
            milestones.measure(milestone)
        else:
            read[milestone] = read_memory(place)

    def watch(what: str, number: int) -> None:
        """Of the first micro batch; through each stage of this rank, if there are several."""
        nonlocal recomputed
        if number == 0 and what == "backward":
            note("forward")
            calls.clear()
        elif number == 0 and what == "done":
            recomputed += len(calls)
            note("backward")

    try:
        for turn in range(MOST_TURNS):
            began = time.monotonic()
            inputs, count = windows.inputs(window), len(window.micro_batches)
            engine.accumulate(inputs, count, window.divisor, watch if turn == 0 else lambda *_: None)
            for milestone, reading in read.items():  # what was not told on the way
                milestones.measure(milestone, reading)
            read.clear()
            _, stepped = engine.step(0.0).read(torch.zeros((), device=place.device))
            taken += not stepped.skipped or stepped.loss_scale is None
            seconds = time.monotonic() - began
            if taken == PASSES:
                break
        milestones.measure("step")
    finally:
        for hook in hooks:
            hook.remove()
    engine.forget()
    torch.set_rng_state(on_host)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, place.device)
    return seconds, read_memory(place).peak_bytes, recomputed
