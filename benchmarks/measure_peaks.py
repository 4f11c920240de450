"""Measure what a training step really takes on one GPU that poses as rank 0 of N.

The process group is torch's fake one: every buffer is allocated as in the real job and no bytes are
communicated. One scenario a process, so that each starts with an empty allocator:

    python benchmarks/measure_peaks.py benchmarks/data/scenarios.jsonl --out rows.jsonl [--only id,id] [--blame]

A scenario is one JSON object: `id`, `config` (Hugging Face fields with `model_type`), `world`, `engine`
(zero0..zero3, fsdp2), and any of `seq`, `micro`, `accum`, `dtype`, `ckpt`, `lora`, `targets`, `quant`,
`offload_optimizer`, `offload_param`, `optimizer`, `loss`, `attention`, `zero` (overrides of DeepSpeed's
`zero_optimization`), `cap_gib`, `steps`, `timed`. The first `steps` (3) steps are watched phase by phase, which
waits for the GPU at each mark; `timed` (10) more are only timed, and `median_s` is theirs. `--fork` imports torch
once and forks a process for each scenario. The first DeepSpeed run of a machine compiles its optimizer, a minute or
more: `--limit-s` must leave it time, or the next runs wait for its lock. `--blame` adds the live allocations at
the peak, by source line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import blame as blaming

GiB = 2**30
ON_CPU = os.environ.get("MEASURE_ON_CPU") == "1"
"""A dry run of the script itself: the same steps on the CPU, all figures zero."""
DEVICE = "cpu" if ON_CPU else "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--blame", action="store_true")
    parser.add_argument("--limit-s", type=int, default=150)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("ROW " + json.dumps(measure(json.loads(args.child), blame=args.blame)))
        return
    if args.fork:
        import torch
        import transformers.models.auto.modeling_auto  # noqa: F401

        args.fork = not torch.cuda.is_initialized()  # a fork cannot share a CUDA context
    wanted = {word for word in args.only.split(",") if word}
    for line in args.scenarios.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        scenario = json.loads(line)
        if not wanted or scenario["id"] in wanted:
            run_forked(scenario, args) if args.fork else run_child(scenario, args)


def run_forked(scenario: dict[str, Any], args: argparse.Namespace) -> None:
    """Likewise in a fork of this process, which has torch loaded and no CUDA context yet."""
    began = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            row = measure(scenario, blame=args.blame)
        except BaseException as error:
            row = {"id": scenario["id"], "scenario": scenario, "error": f"{type(error).__name__}: {error}"[-1500:]}
        os.write(writing, json.dumps(row).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], args.limit_s)
    text = b""
    if ready:
        while piece := os.read(reading, 1 << 16):
            text += piece
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    os.waitpid(pid, 0)
    row = json.loads(text) if text else {"id": scenario["id"], "scenario": scenario, "error": "timed out or died"}
    record(row, began, args)


def run_child(scenario: dict[str, Any], args: argparse.Namespace) -> None:
    """One scenario in a process of its own; its row is appended as soon as it is there."""
    command = [sys.executable, __file__, str(args.scenarios), "--out", str(args.out), "--child", json.dumps(scenario)]
    if args.blame:
        command.append("--blame")
    began = time.monotonic()
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=args.limit_s)
        rows = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
        tail = (done.stderr or done.stdout)[-1500:]
    except subprocess.TimeoutExpired:
        rows, tail = [], "timed out"
    row = json.loads(rows[0]) if rows else {"id": scenario["id"], "scenario": scenario, "error": tail}
    record(row, began, args)


def record(row: dict[str, Any], began: float, args: argparse.Namespace) -> None:
    row["wall"] = round(time.monotonic() - began, 1)
    with args.out.open("a") as out:
        out.write(json.dumps(row) + "\n")
    shown = (row.get(name) for name in ("init_peak", "median_s", "wall"))
    print(row["id"], row.get("peak", row.get("error")), *shown, flush=True)


def measure(scenario: dict[str, Any], *, blame: bool) -> dict[str, Any]:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    import torch

    from tightfit.train.place import join_alone

    os.environ.update({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(scenario["world"])})
    torch.manual_seed(0)
    if not ON_CPU:
        torch.cuda.set_device(0)
    join_alone(0, scenario["world"])
    if cap := scenario.get("cap_gib"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap * GiB / total)
        from deepspeed.accelerator import get_accelerator

        # a capped process must also be told that the card is small
        get_accelerator().available_memory = lambda *_: int(cap * GiB) - torch.cuda.memory_allocated()
    if blame:
        blaming.start()
    phases: dict[str, dict[str, float]] = {}
    began = time.monotonic()

    def mark(name: str) -> None:
        if ON_CPU:
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        phases[name] = {
            "at_s": round(time.monotonic() - began, 4),
            "alloc": round(torch.cuda.memory_allocated() / GiB, 3),
            "peak": round(torch.cuda.max_memory_allocated() / GiB, 3),
            "reserved": round(torch.cuda.max_memory_reserved() / GiB, 3),
            "device": round((total - free) / GiB, 3),
        }

    trainer = Fsdp2(scenario) if scenario["engine"] == "fsdp2" else DeepSpeed(scenario)
    trainer.build()
    mark("model")
    trainer.initialise()
    mark("engine")
    init_s = time.monotonic() - began
    # DeepSpeed resets the statistics on its way, so the peak is that of either mark
    init_peak = max((phases[name]["peak"] for name in ("model", "engine") if name in phases), default=0.0)
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
    began_at = len(blaming.history()) if blame else 0
    times = [train_step(trainer, scenario, mark, f"{step}") for step in range(scenario.get("steps", 3))]
    timed = [train_step(trainer, scenario) for _ in range(scenario.get("timed", 10))]
    row = {
        "id": scenario["id"],
        "phases": phases,
        "params": trainer.count(trainable=False),
        "trainable": trainer.count(trainable=True),
        "init_s": round(init_s, 1),
        "times": times,
        "timed": timed,
        "median_s": round(statistics.median(timed), 4) if timed else None,
        "host_rss": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GiB, 2),
        "peak": round(torch.cuda.max_memory_allocated() / GiB, 3),
        "init_peak": init_peak,
        "reserved": round(torch.cuda.max_memory_reserved() / GiB, 3),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "scenario": scenario,
    }
    if blame:
        events = blaming.history()
        row["blame"] = {"init": blaming.holders(events, 0, began_at), "peak": blaming.holders(events, began_at)}
    return row


def train_step(trainer: Any, scenario: dict[str, Any], mark: Any = None, name: str = "") -> float:
    """One optimizer step; its seconds. With `mark`, watched after each pass."""
    import torch

    micro, seq, accum = scenario.get("micro", 1), scenario.get("seq", 2048), scenario.get("accum", 1)
    vocab = scenario["config"].get("vocab_size", 32000)
    watch = mark or (lambda _: None)
    began = time.monotonic()
    for micro_step in range(accum):
        ids = torch.randint(0, vocab, (micro, seq), device=DEVICE)
        loss = trainer.forward(ids)
        watch(f"fwd{name}")
        trainer.backward(loss)
        del loss
        watch(f"bwd{name}")
        trainer.step(last=micro_step == accum - 1)
        watch(f"step{name}")
    if not ON_CPU:
        torch.cuda.synchronize()
    return round(time.monotonic() - began, 4)


class DeepSpeed:
    """DeepSpeed's own engine, stages 0 to 3."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.stage = int(scenario["engine"].removeprefix("zero"))

    def config(self) -> dict[str, Any]:
        scenario = self.scenario
        zero: dict[str, Any] = {"stage": self.stage, **scenario.get("zero", {})}
        for part in ("offload_optimizer", "offload_param"):
            if device := scenario.get(part):
                zero[part] = {"device": "cpu" if device is True else device, "pin_memory": not ON_CPU}
                if device == "nvme":
                    zero[part]["nvme_path"] = "/tmp/nvme"
        dtype = scenario.get("dtype", "bf16")
        return {
            "train_micro_batch_size_per_gpu": scenario.get("micro", 1),
            "gradient_accumulation_steps": scenario.get("accum", 1),
            "zero_optimization": zero,
            **({dtype: {"enabled": True, **scenario.get(dtype, {})}} if dtype != "fp32" else {}),
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }

    def build(self) -> None:
        import contextlib

        import deepspeed

        deepspeed.init_distributed(dist_backend="fake", dist_init_required=False)
        context: Any = contextlib.nullcontext()
        if self.stage == 3:
            from transformers.initialization import no_init_weights

            context = contextlib.ExitStack()
            context.enter_context(no_init_weights())
            context.enter_context(deepspeed.zero.Init(config_dict_or_path=self.config()))
        self.model = build_model(self.scenario, context)
        if self.stage == 3:
            self.fill()

    def fill(self) -> None:
        """Without initialisation a shard holds whatever lay there, and a NaN makes DeepSpeed skip its steps."""
        import torch

        for tensor in self.model.parameters():
            shard = getattr(tensor, "ds_tensor", None)
            if shard is not None and shard.is_floating_point():
                shard.data.copy_(torch.randn(shard.shape, device=DEVICE, dtype=shard.dtype).mul_(0.02))

    def initialise(self) -> None:
        import deepspeed

        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=make_optimizer(self.scenario, trainable), config=self.config()
        )

    def forward(self, ids: Any) -> Any:
        return self.engine(input_ids=ids, labels=ids, use_cache=False).loss

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def step(self, *, last: bool) -> None:
        del last  # DeepSpeed counts the micro batches itself
        self.engine.step()

    def count(self, *, trainable: bool) -> int:
        return sum(
            getattr(p, "ds_numel", p.numel()) for p in self.model.parameters() if p.requires_grad or not trainable
        )


class Fsdp2:
    """`fully_shard` on every layer and the root: fp32 sharded master weights, 16-bit compute."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario

    def build(self) -> None:
        import contextlib

        import torch

        with torch.device("meta"):
            self.model = build_model(self.scenario, contextlib.nullcontext(), device="meta")

    def initialise(self) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(DEVICE, (self.scenario["world"],))
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
            self.scenario.get("dtype", "bf16")
        ]
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if self.scenario.get("offload_param"):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=not ON_CPU)
        for group in shard_groups(self.model):
            fully_shard(group, **options)
        fully_shard(self.model, **options)
        self.model.to_empty(device="cpu" if self.scenario.get("offload_param") else DEVICE)
        for tensor in self.model.parameters():
            torch.nn.init.normal_(tensor, std=0.02)
        fill_buffers(self.model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.scenario, trainable, fsdp=True)

    def forward(self, ids: Any) -> Any:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self, *, last: bool) -> None:
        import torch

        if not last:
            return
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def count(self, *, trainable: bool) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad or not trainable)


def layers_of(model: Any) -> list[Any]:
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len))


def shard_groups(model: Any) -> list[Any]:
    """The embedding, each layer, the final norm with the head; a tied embedding stays with the root."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head.weight is embedding.weight:
        return layers_of(model)
    body = getattr(base, base.base_model_prefix)
    norm = next(child for name, child in body.named_children() if "norm" in name or name == "ln_f")
    return [embedding, *layers_of(model), [norm, head]]


def fill_buffers(model: Any) -> None:
    """`to_empty` leaves rotary frequencies as garbage: give each rotary module its own again."""
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            fresh = type(module)(module.config).to(DEVICE)
            module.inv_freq = fresh.inv_freq


def build_model(scenario: dict[str, Any], context: Any, device: str = DEVICE) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(scenario["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if "mamba" not in config.model_type:
        config._attn_implementation = scenario.get("attention", "sdpa")
    elif scenario.get("scan") == "tightfit":
        from tightfit.mamba.install import install

        install()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[scenario.get("dtype", "bf16")]
    if scenario["engine"] == "fsdp2" and not scenario.get("lora"):
        dtype = torch.float32
    with torch.device(device), context:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    if scenario.get("quant") == 4:
        model = quantise(model)
    if rank := scenario.get("lora"):
        model = add_lora(model, rank, scenario)
    if scenario.get("loss") == "fused":
        fuse_loss(model)
    if scenario.get("ckpt", True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in layers_of(model)[scenario.get("ckpt_layers", 10**6) :]:
            layer.gradient_checkpointing = False
        if scenario.get("lora"):
            model.enable_input_require_grads()
    model.train()
    return model


def add_lora(model: Any, rank: int, scenario: dict[str, Any]) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    targets = scenario.get("targets", "all-linear")
    model = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), autocast_adapter_dtype=False
    )
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}[scenario.get("adapter_dtype", "bf16")]
    for name, tensor in model.named_parameters():
        if "lora_" in name and tensor.dtype != wanted and scenario["engine"] != "zero3":
            tensor.data = tensor.data.to(wanted)
    return model


def quantise(model: Any) -> Any:
    """NF4 with double quantisation, layer by layer, embeddings and head left alone."""
    import bitsandbytes as bnb
    import torch

    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and "lm_head" not in f"{name}.{child_name}":
                new = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=True,
                    quant_type="nf4",
                )
                new.weight = bnb.nn.Params4bit(child.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                if child.bias is not None:
                    new.bias = torch.nn.Parameter(child.bias.data, requires_grad=False)
                setattr(module, child_name, new.to(DEVICE))
    model.is_loaded_in_4bit = True
    return model


def fuse_loss(model: Any) -> None:
    """Chunked linear cross entropy called inside the head's forward, so that ZeRO-3 gathers its weight."""
    import types

    from tightfit.train.loss import linear_cross_entropy

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()

    def forward(self: Any, hidden: Any) -> Any:
        return linear_cross_entropy(hidden, self.weight, self.labels)

    head.forward = types.MethodType(forward, head)

    def whole(self: Any, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
        body = getattr(self, self.base_model_prefix)
        hidden = body(input_ids=input_ids, use_cache=False)[0]
        head.labels = labels
        return types.SimpleNamespace(loss=head(hidden))

    base.forward = types.MethodType(whole, base)


def make_optimizer(scenario: dict[str, Any], trainable: list[Any], fsdp: bool = False) -> Any:
    import torch

    kind = scenario.get("optimizer", "adamw")
    if kind == "adamw8bit":
        import bitsandbytes as bnb

        return bnb.optim.AdamW8bit(trainable, lr=1e-5)
    if kind == "sgd":
        return torch.optim.SGD(trainable, lr=1e-5)
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trainable, lr=1e-5, relative_step=False, scale_parameter=False)
    if fsdp:
        return torch.optim.AdamW(trainable, lr=1e-5, fused=not (ON_CPU or scenario.get("offload_param")))
    if scenario.get("offload_optimizer") or ON_CPU:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(trainable, lr=1e-5)
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(trainable, lr=1e-5)


if __name__ == "__main__":
    main()
