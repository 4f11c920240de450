"""How many parameters ZeRO-3 holds whole: our replay against DeepSpeed's real coordinator.

A process of its own (this file, run as a script) trains tiny models with the real DeepSpeed on the CPU, as one
rank of four under torch's fake process group, three steps each. In the third, when the trace is complete, it
writes down after every fetch how many elements are whole, and how many more sit in flat buffers out of which
they were copied. The thresholds are scaled down with the models, so that every limit bites.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

WORLD = 4
SLACK = 0
"""Elements by which the replay may be off. The largest matrix of a layer would still be a good prediction."""
LEAF = 29_568
"""Elements of a mixer of the Mamba below. DeepSpeed waits for a leaf's parameters in the order of a set, which is never
the same, and so are the flat buffers that lie side by side meanwhile: the replay counts all of them."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "tie_word_embeddings": True,
}
# prefetch_bucket, max_live_parameters, max_reuse_distance, persistence_threshold
LIMITS = {
    "tight": (10_000, 80_000, 50_000, 0),
    "persistent": (5_000, 60_000, 60_000, 2_048),
    "ample": (20_000, 10**9, 10**9, 500),
    "alone": (0, 80_000, 0, 0),
    "tightest": (3_000, 40_000, 20_000, 600),
    "near": (10_000, 10**9, 60_000, 0),
    "far": (10_000, 10**9, 300_000, 600),
}
ZERO_KEYS = (
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
)
REDUCE_BUCKET = 1_000_000


def scenario(name: str) -> dict[str, Any]:
    """`llama tied checkpointed lora tight`: a scenario of benchmarks/measure_peaks.py."""
    family, *words, limits = name.split()
    config = {**LLAMA, "tie_word_embeddings": "tied" in words} if family == "llama" else dict(MAMBA)
    if "falcon" in words:
        config["model_type"] = "falcon_mamba"
    if "untied" in words:
        config["tie_word_embeddings"] = False
    made: dict[str, Any] = {
        "id": name,
        "config": config,
        "world": WORLD,
        "engine": "zero3",
        "optimizer": "sgd",
        "ckpt": "checkpointed" in words,
        "seq": 16,
        "zero": {**dict(zip(ZERO_KEYS, LIMITS[limits], strict=True)), "reduce_bucket_size": REDUCE_BUCKET},
        "trains": "embeddings" if "embeddings" in words else "all",
        "scan": "tightfit" if "leaf" in words else "official",
        "accum": 2 if "accumulated" in words else 1,
    }
    return {**made, "lora": 4} if "lora" in words else made


NAMES = (
    "llama checkpointed tight",
    "llama checkpointed persistent",
    "llama checkpointed alone",
    "llama tied checkpointed tightest",
    "llama tight",
    "llama tied ample",
    "llama checkpointed lora tight",
    "llama checkpointed lora ample",
    "llama checkpointed lora alone",
    "llama tied checkpointed lora tightest",
    "llama lora tight",
    "llama tied lora persistent",
    "mamba checkpointed ample",
    "mamba checkpointed tight",
    "mamba untied near",
    "mamba tightest",
    "llama checkpointed embeddings tight",
    "llama checkpointed embeddings ample",
    "llama tied checkpointed embeddings tightest",
    "llama embeddings tight",
    "llama tied embeddings persistent",
    "mamba checkpointed embeddings ample",
    "mamba embeddings tightest",
    "mamba leaf checkpointed tight",
    "mamba leaf checkpointed persistent",
    "mamba leaf checkpointed alone",
    "mamba leaf checkpointed ample",
    "mamba leaf tight",
    "mamba leaf persistent",
    "mamba leaf alone",
    "mamba leaf ample",
    "mamba leaf tightest",
    "mamba leaf untied checkpointed tight",
    "mamba leaf untied far",
    "mamba leaf untied near",
    "mamba leaf falcon checkpointed tightest",
    "mamba leaf falcon untied near",
    "mamba leaf checkpointed embeddings tight",
    "mamba leaf embeddings near",
    "llama accumulated persistent",
    "llama checkpointed lora accumulated persistent",
    "llama tied accumulated tightest",
)
"""`accumulated`: what is watched is the second micro batch of the first step, which fetches the small ones too."""
QUICK = (
    "llama checkpointed embeddings tight",
    "llama tied ample",
    "llama checkpointed lora alone",
    "mamba untied near",
    "mamba leaf untied far",
    "mamba leaf falcon checkpointed tightest",
    "llama checkpointed lora accumulated persistent",
)
"""Each model, each limit and each word once; the others are slow."""
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]

# --- the process that runs DeepSpeed ------------------------------------------------------------


def record(scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    """For each scenario the fetches of its third step: (forward, module, whole elements with copies); and the most
    elements of gradients of mixers that waited there to be reduced."""
    os.environ.update({"MEASURE_ON_CPU": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(WORLD)})
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import torch
    import torch.distributed as dist
    from measure_peaks import DeepSpeed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tightfit.mamba.install import install, uninstall
    from tightfit.train.build import freeze
    from tightfit.train.engines.deepspeed import gather_mixers_whole
    from tightfit.types import Levers

    torch.set_num_threads(1)
    torch.empty = _zeroed(torch.empty)
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    watch = Watch()
    found = {}
    for each in scenarios:
        if each["scan"] == "tightfit":
            install()
        elif each["config"]["model_type"] == "mamba":
            _stand_in_for_the_scan_kernel()
        trainer = DeepSpeed(each)
        trainer.build()
        freeze(trainer.model, Levers(trains=each["trains"]))
        if each["scan"] == "tightfit":
            gather_mixers_whole(trainer.model, trainer.config())
        trainer.initialise()
        engine = trainer.engine
        watch.begin(engine.module)
        watch.small_too = each["accum"] > 1
        for step in range(each["accum"] if watch.small_too else 3):
            watch.recording = step == (1 if watch.small_too else 2)
            ids = torch.randint(0, 512, (1, each["seq"]))
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            watch.recording = False
            engine.step()
        assert engine.skipped_steps == 0
        found[each["id"]] = {"calls": watch.calls, "waiting": watch.waiting}
        engine.destroy()
        uninstall()
    return found


def _zeroed(empty: Any) -> Any:
    """The fake process group leaves gathered weights as they were allocated: make that finite."""

    def zeroed(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        return made if made.is_meta else made.zero_()

    return zeroed


def _stand_in_for_the_scan_kernel() -> None:
    """Like `mamba_inner_fn`, one autograd function over the mixer's own weights."""
    import torch
    from transformers.models.mamba import modeling_mamba

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, xz: Any, out: Any, *others: Any) -> Any:
            ctx.save_for_backward(xz, out, *others)
            return xz[:, : xz.shape[1] // 2].transpose(1, 2) @ out.t()

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return tuple(torch.zeros_like(each) for each in ctx.saved_tensors)

    def inner(*given: Any, **named: Any) -> Any:
        xz, conv, _, x_proj, dt, out, _, a, _, _, d = given
        return Inner.apply(xz, out, conv, x_proj, dt, a, d, named["delta_bias"])

    modeling_mamba.mamba_inner_fn = inner


def key_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Watch:
    """Hangs on DeepSpeed's coordinator."""

    def __init__(self) -> None:
        from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        self.recording = self.small_too = False
        self.calls: list[Any] = []
        self.passing = 0
        fetch, wait = PartitionedParameterCoordinator.fetch_sub_module, AllGatherCoalescedHandle.wait

        def fetched(coordinator: Any, module: Any, forward: bool) -> None:
            self.passing = 0
            self.registry = coordinator._PartitionedParameterCoordinator__inflight_param_registry
            fetch(coordinator, module, forward)
            if self.recording:
                held = max(self.passing, self.whole() + self.copied())
                self.calls.append((forward, self.names[id(module)], held))

        def waited(handle: Any, **options: Any) -> None:
            again = handle.complete
            wait(handle, **options)
            if self.recording and not again:
                self.passing = max(self.passing, self.whole() + self.copied(handle))

        reduce = DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads

        def reduced(optimizer: Any, param: Any) -> None:
            if self.recording:
                buckets = {key_of(bucket.buffer) for bucket in optimizer.ipg_buckets.values()}
                grads = [p.grad for p in self.mixing if p.grad is not None and key_of(p.grad) not in buckets]
                self.waiting = max(self.waiting, sum(grad.numel() for grad in grads))
            reduce(optimizer, param)

        PartitionedParameterCoordinator.fetch_sub_module = fetched
        AllGatherCoalescedHandle.wait = waited
        DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads = reduced

    def begin(self, module: Any) -> None:
        self.names = {id(each): name for name, each in module.named_modules()}
        self.params = list(module.parameters())
        self.mixing = [param for name, param in module.named_parameters() if ".mixer." in name]
        self.calls = []
        self.waiting = 0

    def whole(self) -> int:
        """Whole or on their way; parameters that are never released left out, unless they have to be fetched."""
        there = [each for each in self.params if each.ds_status.name != "NOT_AVAILABLE"]
        return sum(each.ds_numel for each in there if self.small_too or not each.ds_persist)

    def copied(self, *others: Any) -> int:
        """Flat buffers that have been copied out and are still referenced."""
        known = [one for several in self.registry.values() for one in getattr(several, "handles", [several])]
        handles = {id(handle): handle for handle in (*known, *others)}
        done = [handle for handle in handles.values() if getattr(handle, "complete", False)]
        return sum(part.numel() for handle in done for part in getattr(handle, "partitions", ()))


# --- the comparison -----------------------------------------------------------------------------


def by_stretch(calls: list[Any]) -> dict[str, list[Any]]:
    """The calls of each stretch: forward, loss, `layer 3` … `layer 0`, embedding."""
    found: dict[str, list[Any]] = {}
    stretch = "forward"
    for forward, name, held in calls:
        layer = re.search(r"layers\.(\d+)", name)
        if stretch == "forward":
            stretch = "loss" if "lm_head" in name or not forward else "forward"
        elif layer:
            stretch = f"layer {layer[1]}"
        elif "embed" in name:
            stretch = "embedding"
        found.setdefault(stretch, []).append((forward, held))
    return found


def measured(calls: list[Any]) -> dict[str, int]:
    """The most of each stretch; of a layer, the most after its recomputation, and what it held at the end of that."""
    most = {}
    for stretch, made in by_stretch(calls).items():
        again = [index for index, (forward, _) in enumerate(made) if forward]
        turn = again[-1] if again and stretch.startswith("layer") else 0
        most[stretch] = max(held for _, held in made[turn:])
        if turn:
            most[f"{stretch} at its turn"] = made[turn][1]
    return most


def job_of(name: str) -> Any:
    from rows import levers_of, shape_of

    from tightfit.memory.job import make_job

    each = scenario(name)
    return make_job(shape_of(each), replace(levers_of(each), trains=each["trains"]), WORLD, None)


def replayed(name: str) -> dict[str, int]:
    from tightfit.memory.zero3 import gather_for

    each, found = scenario(name), gather_for(job_of(name), all_cut="accumulated" in name)
    predicted = {"forward": found.forward, "loss": max(found.loss, found.norm), "embedding": found.embedding}
    for index, (turn, most) in enumerate(zip(found.layers, found.gradients, strict=True)):
        predicted |= {f"layer {index}": most}
        if each["ckpt"]:
            predicted |= {f"layer {index} at its turn": turn}
    return predicted


@pytest.fixture(scope="session")
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scenario that is asked for, run once, by whichever of the test workers comes first; the others wait."""
    pytest.importorskip("torch")
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {each.get("name") for each in params}
    names = [name for name in NAMES if name in asked or name in QUICK]
    base = tmp_path_factory.getbasetemp()
    answer = (base if alone else base.parent) / "gathered.json"
    with answer.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_text(json.dumps(_run_deepspeed(names)))
    found: dict[str, Any] = json.loads(answer.read_text())
    assert "failed" not in found, found["failed"]
    return found


def _run_deepspeed(names: list[str]) -> dict[str, Any]:
    """What it found, or why it failed: the other workers need not try again."""
    import warm_desk

    script = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    done = warm_desk.python(script, json.dumps([scenario(name) for name in names]), ranks=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        return {"failed": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return found


@pytest.mark.parametrize("name", EVERY)
def test_the_replay_holds_what_deepspeed_holds(real: dict[str, Any], name: str) -> None:
    found, predicted = measured(real[name]["calls"]), replayed(name)
    off = {stretch: held - found.get(stretch, 0) for stretch, held in predicted.items()}
    above = LEAF if "leaf" in name else SLACK
    assert all(-SLACK <= elements <= above for elements in off.values()), f"measured {found}, off by {off}"


@pytest.mark.parametrize("name", [name for name in QUICK if "mamba" in name and "embeddings" not in name])
def test_a_leafs_gradients_wait_for_each_other(real: dict[str, Any], name: str) -> None:
    from tightfit.memory.zero3 import hold_by_leaves

    if "leaf" not in name:
        assert 0 < real[name]["waiting"] < LEAF
        return
    assert real[name]["waiting"] == LEAF
    job = job_of(name)
    *arrivals, _norm = hold_by_leaves(job.acts, job.shape).moments[0].cost.arrivals
    grads, held = zip(*arrivals, strict=True)
    assert sum(grads) // job.weights.width == LEAF
    assert grads[0] + held[0] - held[-1] == sum(grads), "when the first leaves, all others are there"


def test_every_limit_bites(real: dict[str, Any]) -> None:
    """The scenarios are worth their name: they hold different amounts of one model."""
    alike = [name for name in real if name.startswith("llama checkpointed ") and "embeddings" not in name]
    peaks = {name: max(held for *_, held in real[name]["calls"]) for name in alike}
    assert len(set(peaks.values())) == len(peaks)


if __name__ == "__main__":
    print("FOUND " + json.dumps(record(json.loads(sys.argv[1]))))  # noqa: T201
