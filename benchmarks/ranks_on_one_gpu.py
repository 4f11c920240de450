"""Several real ranks on one GPU, in every layout that spreads a training, and layers that stream: do they compute what
one rank alone does?

    python benchmarks/ranks_on_one_gpu.py prepare DIR                       # on the desk: a plan for each of `LAYOUTS`
    python benchmarks/ranks_on_one_gpu.py run DIR --out rows.jsonl [--only streamed] [--at-once 3]    # on a GPU

NCCL refuses two ranks on one GPU, and gloo has few collectives for CUDA's tensors. So each collective goes through the
host: the tensor is copied there, sent by gloo, and copied back. All else is the worker as it is. Losses are compared
with those of one rank that has the whole batch, in fp32: sums in another order differ by parts in a hundred thousand.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS = 5
USUAL: dict[str, Any] = {"model": "tiny_llama", "precision": "fp32", "seq": 128, "effective_batch": 8, "micro_batch": 1,
                         "max_steps": STEPS, "learning_rate": 3e-3, "checkpointing": "full", "compile": "off",
                         "attention": "sdpa", "loss": "plain"}  # fmt: skip
WIDE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 2048, "tie_word_embeddings": False}  # fmt: skip
"""With as many heads of keys and values as there are ranks."""
ADAPTERS = {"model": WIDE, "method": "lora", "lora_rank": 4, "learning_rate": 3e-2}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
           "vocab_size": 512, "max_position_embeddings": 2048}  # fmt: skip
EXPERTS = {"model": MIXTRAL, "engine": "fsdp2"}
STREAM = {"engine": "stream", "resident": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"engine": "ddp"}),
    "FSDP2 over 4": (4, {"engine": "fsdp2"}),
    "FSDP2 in groups of 2": (4, {"engine": "fsdp2", "shard_within": 2}),
    "FSDP2, 2 GPUs per sequence": (4, {"engine": "fsdp2", "sequence_parallel": 2}),
    "FSDP2 in groups of 2, 4 GPUs per sequence": (4, {"engine": "fsdp2", "shard_within": 2, "sequence_parallel": 4}),
    "FSDP2 over 2, pipeline of 2": (4, {"engine": "fsdp2", "pipeline_parallel": 2}),
    "FSDP2, pipeline of 4": (4, {"engine": "fsdp2", "pipeline_parallel": 4, "loss": "fused"}),
    "FSDP2 over 2, pipeline of 2, interleaved": (4, {"engine": "fsdp2", "pipeline_parallel": 2, "stages_per_gpu": 2}),
    "FSDP2, pipeline of 2, 2 GPUs per layer": (4, {"engine": "fsdp2", "pipeline_parallel": 2, "tensor_parallel": 2}),
    "FSDP2, interleaved pipeline of 2, 2 GPUs per sequence": (4, {"engine": "fsdp2", "pipeline_parallel": 2,
                                                                  "stages_per_gpu": 2, "sequence_parallel": 2}),
    "FSDP2 over 2, 2 GPUs per layer": (4, {"engine": "fsdp2", "tensor_parallel": 2}),
    "FSDP2 in groups of 2, 2 GPUs per layer": (4, {"engine": "fsdp2", "tensor_parallel": 2, "shard_within": 2}),
    "streamed": (1, {**STREAM, "update": "waits"}),
    "streamed, updates ahead": (1, {**STREAM, "update": "ahead"}),
    "streamed, inputs on the host": (1, {**STREAM, "checkpointing": "full+offload"}),
    "streamed, compiled": (1, {**STREAM, "compile": "layers", "checkpointing": "none"}),
    "streamed, compiled, selected on the host": (1, {**STREAM, "compile": "layers",
                                                     "checkpointing": "select:mlp+offload"}),
    "streamed over 2": (2, {**STREAM, "update": "waits"}),
    "streamed over 4, updates ahead": (4, {**STREAM, "update": "ahead"}),
    "streamed over 4, inputs on the host": (4, {**STREAM, "resident": 0, "checkpointing": "full+offload"}),
    "ZeRO-2, 2 GPUs per sequence": (4, {"engine": "zero2", "sequence_parallel": 2}),
    "ZeRO-3 in groups of 2": (4, {"engine": "zero3", "shard_within": 2}),
    "ZeRO-3, 2 GPUs per sequence": (4, {"engine": "zero3", "sequence_parallel": 2}),
    "experts, alone": (1, {**EXPERTS, "engine": "ddp"}),
    "FSDP2, experts on 2 GPUs": (4, {**EXPERTS, "expert_parallel": 2}),
    "FSDP2, experts on 4 GPUs": (4, {**EXPERTS, "expert_parallel": 4}),
    "FSDP2 in groups of 2, experts on 2 GPUs": (4, {**EXPERTS, "expert_parallel": 2, "shard_within": 2}),
    "FSDP2, pipeline of 2, experts on 2 GPUs": (4, {**EXPERTS, "expert_parallel": 2, "pipeline_parallel": 2}),
    "alone, more heads": (1, {"engine": "ddp", "model": WIDE}),
    "FSDP2, 4 GPUs per layer": (4, {"engine": "fsdp2", "tensor_parallel": 4, "loss": "fused", "model": WIDE}),
    "alone, adapters": (1, {"engine": "ddp", **ADAPTERS}),
    "streamed, adapters": (1, {**STREAM, **ADAPTERS}),
    "streamed, adapters, compiled, selected on the host": (1, {**STREAM, **ADAPTERS, "compile": "layers",
                                                               "checkpointing": "select:mlp+offload"}),
    "streamed over 4, adapters": (4, {**STREAM, **ADAPTERS}),
    "FSDP2 over 2, 2 GPUs per layer, adapters": (4, {"engine": "fsdp2", "tensor_parallel": 2, **ADAPTERS}),
    "FSDP2, pipeline of 2, 2 GPUs per layer, adapters": (4, {"engine": "fsdp2", "pipeline_parallel": 2,
                                                             "tensor_parallel": 2, **ADAPTERS}),
}  # fmt: skip
"""Each is compared with the last one before it of which DDP is the engine."""
LIMIT_S = 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "rank"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", default="", help="layouts with this word, and what they are compared with")
    args = parser.parse_args()
    {"prepare": prepare, "run": run, "rank": work}[args.what](args)


def name_of(layout: str) -> str:
    return layout.replace(" ", "_").replace(",", "")


def prepare(args: argparse.Namespace) -> None:
    from tightfit.formats.render import render
    from tightfit.formats.target import Target
    from tightfit.job.file import job_from_flags
    from tightfit.planner import plan
    from tightfit.types import Gpu, Hardware

    card = Gpu(name="H200", vendor="nvidia", arch="sm_90", memory_bytes=140 << 30)
    args.path.mkdir(parents=True, exist_ok=True)
    data = args.path / "examples.jsonl"
    lines = [{"instruction": f"Say {word} twice.", "output": f"{word} {word}"} for word in _words()]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for layout, (ranks, levers) in LAYOUTS.items():
        folder = args.path / name_of(layout)
        folder.mkdir(exist_ok=True)
        flags = {**USUAL, **levers, "data": "examples.jsonl", "output": "run"}
        flags["micro_batch"] = 8 if levers["engine"] == "ddp" else 2 if ranks == 1 else 1
        if isinstance(flags["model"], dict):
            (folder / "config.json").write_text(json.dumps(flags["model"]))
            flags["model"] = str(folder / "config.json")
        found = plan(job_from_flags(flags), None, Hardware(gpu=card, gpus_per_node=ranks, host_ram_bytes=128 << 30))
        assert found.chosen is not None, layout
        for name, text in render(found, Target()).items():
            (folder / name).write_text(text)


def _words() -> list[str]:
    """As many as a few batches have, of different lengths."""
    return [" ".join(("north", "river", "stone", "green")[: 1 + number % 4]) * (1 + number % 3) for number in range(48)]


def choose(word: str) -> list[str]:
    """Layouts with this word, and what they are compared with."""
    chosen, baseline = dict[str, None](), ""
    for layout, (_, levers) in LAYOUTS.items():
        if levers["engine"] == "ddp":
            baseline = layout
        elif word in layout:
            chosen |= {baseline: None, layout: None}
    return list(chosen)


def run(args: argparse.Namespace) -> None:
    args.path, alone = args.path.resolve(), [0.0]
    with ThreadPoolExecutor(args.at_once) as pool:
        layouts = choose(args.only)
        for layout, row in zip(layouts, pool.map(lambda layout: train(args.path, layout), layouts), strict=True):
            alone = row["losses"] if LAYOUTS[layout][1]["engine"] == "ddp" else alone
            row["apart"] = max(
                [abs(one / other - 1) for one, other in zip(row["losses"], alone, strict=False)], default=1
            )
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(layout, row["wall_s"], row["losses"], f"{row['apart']:.1e}", row.get("error", ""), flush=True)


def train(path: Path, layout: str) -> dict[str, Any]:
    began, ranks = time.monotonic(), LAYOUTS[layout][0]
    folder = path / name_of(layout)
    orders = json.loads((folder / "worker.json").read_text())
    orders["saving"]["folder"] = str(folder / "run")
    orders["data"]["path"] = str(path / "examples.jsonl")
    (folder / "worker.json").write_text(json.dumps(orders))
    codes, said = _start(folder, ranks)
    row: dict[str, Any] = {"layout": layout, "ranks": ranks, "wall_s": round(time.monotonic() - began, 1)}
    events = folder / "run" / "events.jsonl"
    found = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    row["losses"] = [each["loss"] for each in found if each["event"] == "step"]
    if any(codes) or len(row["losses"]) < STEPS:
        row["error"] = said[-1500:]
    return row


def _start(folder: Path, ranks: int) -> tuple[list[int], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "XDG_CACHE_HOME": str(folder / "cache")}  # fmt: skip
    command = [sys.executable, __file__, "rank", str(folder)]
    logs = [(folder / f"rank-{rank}.txt").open("w") for rank in range(ranks)]
    started = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in started]
    except subprocess.TimeoutExpired:
        codes = [124]
    finally:
        for process in started:
            process.kill()
    return codes, (folder / "rank-0.txt").read_text()


# --- one rank -------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    import torch.distributed as dist

    from tightfit.train import place
    from tightfit.train.__main__ import main as train

    place.device_index = lambda *_: 0
    begin = dist.init_process_group

    def begin_through_host(backend: str, **named: Any) -> None:
        begin("cpu:gloo,cuda:gloo", **named)
        for name in ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single",
                     "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"):  # fmt: skip
            for module in (dist, dist.distributed_c10d):
                if hasattr(module, name):
                    setattr(module, name, through_host(getattr(module, name)))
        for module in (dist, dist.distributed_c10d):
            module.isend, module.irecv = send_from_host(module.isend), receive_on_host(module.irecv)

    dist.init_process_group = begin_through_host
    train([str(args.path / "worker.json"), "--no-probe"])


class Done:
    """What a collective that was not waited for is to whoever waits for it later."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Arriving:
    """What is on its way to or from the host's copy of a tensor on a GPU."""

    def __init__(self, work: Any, host: Any, device: Any = None) -> None:
        self.work, self.host, self.device = work, host, device

    def wait(self, *_: Any) -> bool:
        import torch

        self.work.wait()
        if self.device is not None:
            with torch.no_grad():
                self.device.copy_(self.host)
        return True


def send_from_host(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_copy(tensor: Any, *words: Any, **named: Any) -> Any:
        host = tensor.detach().cpu()
        return Arriving(send(host, *words, **named), host)

    return send_copy


def receive_on_host(receive: Callable[..., Any]) -> Callable[..., Any]:
    def receive_copy(tensor: Any, *words: Any, **named: Any) -> Any:
        import torch

        host = torch.empty_like(tensor, device="cpu")
        return Arriving(receive(host, *words, **named), host, tensor)

    return receive_copy


def through_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for tensors on a GPU. Gloo knows no averages."""
    import torch
    import torch.distributed as dist

    def send(*words: Any, **named: Any) -> Any:
        every = [*words, *named.values()]
        tensors = [each for each in every if isinstance(each, torch.Tensor) and each.is_cuda]
        if not tensors:
            return collective(*words, **named)
        there = {id(each): each.detach().cpu() for each in tensors}
        averages = any(
            each == dist.ReduceOp.AVG for each in every if isinstance(each, dist.ReduceOp | type(dist.ReduceOp.SUM))
        )

        def move(each: Any) -> Any:
            if isinstance(each, dist.ReduceOp | type(dist.ReduceOp.SUM)) and each == dist.ReduceOp.AVG:
                return dist.ReduceOp.SUM
            return there.get(id(each), each)

        waits = not named.pop("async_op", False)
        collective(*[move(each) for each in words], **{name: move(each) for name, each in named.items()})
        group = named.get("group") or next((each for each in words if isinstance(each, dist.ProcessGroup)), None)
        with torch.no_grad():
            result = there[id(tensors[0])]
            tensors[0].copy_(result / dist.get_world_size(group) if averages else result)
        return None if waits else Done()

    return send


if __name__ == "__main__":
    main()
