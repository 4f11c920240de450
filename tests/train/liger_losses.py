"""Three steps with Liger's kernels and without, on a CPU: `python liger_losses.py FAMILY …` prints both curves as JSON.

Triton's interpreter runs the kernels, started with TRITON_INTERPRET=1. It has neither scalars that are floats nor
CUDA's own functions, so both are given to it here; a rotary embedding that looks for a GPU first is called directly.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import numpy
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.train.kernels import bind_liger

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "pad_token_id": 0,
         "num_key_value_heads": 2, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
STEPS = 3


def prepare_interpreter() -> None:
    convert = interpreter._implicit_cvt

    def convert_floats(arg: Any) -> Any:
        if not isinstance(arg, float):
            return convert(arg)
        handle = interpreter.TensorHandle(numpy.array([arg], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_floats
    import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: 1 / tl.sqrt(x)
    import_module("liger_kernel.ops.geglu").tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    rotate = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply
    import_module("liger_kernel.transformers.monkey_patch").liger_rotary_pos_emb = rotate


def train(family: str, *, fused: bool, lora: bool) -> list[float]:
    """In fp32, with plain gradient descent, recomputed where there are adapters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if fused:
        assert bind_liger(model) is None
    if lora:
        options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
        get_peft_model(model, LoraConfig(**options))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    ids = torch.randint(0, 97, (2, 5))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    prepare_interpreter()
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        plain = [train(name, fused=False, lora=lora) for lora in (False, True)]  # first: the rotary embedding stays
        found = {"plain": plain, "fused": [train(name, fused=True, lora=lora) for lora in (False, True)]}
        sys.stdout.write(f"FOUND {json.dumps(found)}\n")
