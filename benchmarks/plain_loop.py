"""What people write by hand: a plain Hugging Face loop on one GPU, eager, with Liger's kernels, with compiled layers,
or with these and Liger's loss.

`fast.py` runs it beside the worker: the same model, batch and method, bf16 weights, torch's fused AdamW on what trains,
gradients clipped, and nothing recomputed. Full training has bf16 weights without fp32 copies, which holds less than the
worker does and is a little faster: the comparison favours the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIDES = ("plain", "plain-liger", "plain-compiled", "plain-compiled-liger-loss")


def loop(orders: dict[str, Any], side: str, steps: int, after: Callable[[int], None]) -> dict[str, Any]:
    """Seconds of each step, and the peak. `orders`: the plan's worker.json; `after` is told the number of each step."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    levers, fields = orders["levers"], dict(orders["model"]["config"])
    if "liger" in side:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        only_loss = {"rope": False, "rms_norm": False, "swiglu": False} if "loss" in side else {}
        MODEL_TYPE_TO_APPLY_LIGER_FN[fields["model_type"]](**only_loss)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.tie_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.fill_(1.0) if "norm" in name else param.normal_(0, 0.02)
    layers: Any = model.model.layers
    if levers["method"] == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=levers["lora_rank"], lora_alpha=2 * levers["lora_rank"], target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.train()
    if "compiled" in side:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(0, 32_000, (levers["micro_batch"], levers["seq"]), device="cuda")
    seconds = []
    for number in range(1, steps + 1):
        began = time.monotonic()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(round(time.monotonic() - began, 4))
        after(number)
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated()}
