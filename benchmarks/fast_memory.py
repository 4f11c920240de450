"""What the worker holds with the levers of speed, against what was predicted: compiled layers, parts that run again.

    python benchmarks/fast_memory.py prepare DIR [--rows later]        # on the desk: a plan for each row of `ROWS`
    python benchmarks/fast_memory.py predict DIR > predicted.json      # on the desk, before anything runs
    python benchmarks/fast_memory.py run DIR --out rows.jsonl [--at-once 6] [--only PART,PART]         # on a GPU
    python benchmarks/fast_memory.py compare rows.jsonl                # how far off each was

Real widths and few layers. Each row is a rehearsal of our own worker for three steps, one of `gpus` on one GPU, with
all levers said. Several start at once, since each process counts its own memory. The first through DeepSpeed on a
machine builds an optimizer for a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import fast

from tightfit.hardware.named import read_hardware
from tightfit.inputs.flags import LEVERS, levers_from_flags
from tightfit.model.load import shape_from_config
from tightfit.pace import pace
from tightfit.types import READ_TOGETHER

MEASURED = [Path(f"{rows}.jsonl") for rows in fast.MEMORY]
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False}  # fmt: skip
QWEN_7B = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False}  # fmt: skip
QWEN_32B = {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False}  # fmt: skip
QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False}  # fmt: skip
GEMMA_9B = {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256_000}  # fmt: skip
MISTRAL_7B = {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32_000, "sliding_window": None}  # fmt: skip
MAMBA_7B = {"model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "state_size": 16,
            "vocab_size": 65_024}  # fmt: skip
LORA = {"model": (LLAMA_8B, 12), "method": "lora", "engine": "ddp", "micro_batch": 2}
ONE_OF_8 = {"model": (QWEN_7B, 8), "gpus": "8xH200", "engine": "fsdp2"}

ROWS: dict[str, dict[str, Any]] = {
    "8B LoRA, none": {**LORA, "checkpointing": "none"},
    "8B LoRA, elementwise": {**LORA, "checkpointing": "select:elementwise"},
    "8B LoRA, mlp": {**LORA, "checkpointing": "select:mlp"},
    "8B LoRA, qkv and mlp of 6": {**LORA, "checkpointing": "select:qkv,mlp+layers:6"},
    "8B LoRA, 6 layers": {**LORA, "checkpointing": "layers:6"},
    "8B LoRA, full": {**LORA, "checkpointing": "full"},
    "8B LoRA, mlp, as written": {**LORA, "checkpointing": "select:mlp", "compile": "off"},
    "8B LoRA, none, plain loss": {**LORA, "checkpointing": "none", "loss": "plain"},
    "8B QLoRA, elementwise": {**LORA, "method": "qlora", "checkpointing": "select:elementwise"},
    "0.5B full, none": {"model": (fast.QWEN_HALF_B, 24), "engine": "ddp", "micro_batch": 8,
                        "checkpointing": "none"},
    "0.5B full, mlp": {"model": (fast.QWEN_HALF_B, 24), "engine": "ddp", "micro_batch": 8,
                       "checkpointing": "select:mlp"},
    "0.5B full, ZeRO-2, elementwise": {"model": (fast.QWEN_HALF_B, 24), "gpus": "8xH200", "engine": "zero2",
                                       "micro_batch": 8, "checkpointing": "select:elementwise"},
    "0.5B full, ZeRO-1, qkv and mlp, as written": {"model": (fast.QWEN_HALF_B, 24), "gpus": "8xH200",
                                                   "engine": "zero1", "micro_batch": 8, "compile": "off",
                                                   "checkpointing": "select:qkv,mlp"},
    "7.6B full, none": {**ONE_OF_8, "checkpointing": "none"},
    "7.6B full, full": {**ONE_OF_8, "checkpointing": "full"},
    "7.6B full, mlp, 4 rows": {**ONE_OF_8, "checkpointing": "select:mlp", "micro_batch": 4},
    "7.6B full, mlp, as written": {**ONE_OF_8, "checkpointing": "select:mlp", "micro_batch": 2, "compile": "off"},
    "7.6B full, ZeRO-2, none": {**ONE_OF_8, "engine": "zero2", "checkpointing": "none", "micro_batch": 2},
    "7.6B full, ZeRO-1, full, twice": {**ONE_OF_8, "engine": "zero1", "checkpointing": "full", "accum": 2},
    "32B LoRA, none": {"model": (QWEN_32B, 10), "gpus": "8xH200", "method": "lora", "engine": "fsdp2", "seq": 1024,
                       "micro_batch": 2, "checkpointing": "none"},
    "Qwen3 8B LoRA, elementwise": {"model": (QWEN3_8B, 12), "method": "lora", "engine": "ddp", "micro_batch": 2,
                                   "checkpointing": "select:elementwise"},
    "Gemma-2 9B LoRA, none": {"model": (GEMMA_9B, 10), "method": "lora", "engine": "ddp", "checkpointing": "none"},
    "Gemma-2 9B LoRA, mlp": {"model": (GEMMA_9B, 10), "gpus": "2xH200", "method": "lora", "engine": "fsdp2",
                             "micro_batch": 2, "checkpointing": "select:mlp"},
    "Mistral full, ZeRO-2, none": {"model": (MISTRAL_7B, 8), "gpus": "4xH200", "engine": "zero2", "seq": 4096,
                                   "checkpointing": "none"},
    "7B Mamba full, none": {"model": (MAMBA_7B, 12), "gpus": "4xH200", "engine": "fsdp2", "scan": "tightfit",
                            "checkpointing": "none"},
    "7B Mamba full, full": {"model": (MAMBA_7B, 12), "gpus": "4xH200", "engine": "fsdp2", "scan": "tightfit",
                            "checkpointing": "full"},
}  # fmt: skip
LATER: dict[str, dict[str, Any]] = {
    "8B LoRA, out and mlp, 4 rows": {**LORA, "micro_batch": 4, "checkpointing": "select:out,mlp"},
    "8B LoRA, 3 layers, 1024": {**LORA, "seq": 1024, "checkpointing": "layers:3"},
    "8B LoRA, none, 8192": {**LORA, "micro_batch": 1, "seq": 8192, "checkpointing": "none"},
    "8B LoRA, none, Liger": {**LORA, "checkpointing": "none", "compile": "off", "kernels": "fused"},
    "8B LoRA, qkv and mlp, as written": {**LORA, "checkpointing": "select:qkv,mlp", "compile": "off"},
    "8B QLoRA, full": {**LORA, "method": "qlora", "checkpointing": "full"},
    "0.5B full, none, 4096": {"model": (fast.QWEN_HALF_B, 24), "engine": "ddp", "seq": 4096, "micro_batch": 2,
                              "checkpointing": "none"},
    "0.5B full, qkv, FSDP2": {"model": (fast.QWEN_HALF_B, 24), "gpus": "4xH200", "engine": "fsdp2", "micro_batch": 8,
                              "checkpointing": "select:qkv"},
    "0.5B full, none, Liger": {"model": (fast.QWEN_HALF_B, 24), "engine": "ddp", "micro_batch": 8,
                                         "checkpointing": "none", "compile": "off", "kernels": "fused"},
    "7.6B full, none, 2 rows": {**ONE_OF_8, "checkpointing": "none", "micro_batch": 2},
    "7.6B full, elementwise": {**ONE_OF_8, "checkpointing": "select:elementwise"},
    "7.6B full, full, 4 rows, twice": {**ONE_OF_8, "checkpointing": "full", "micro_batch": 4, "accum": 2},
    "7.6B full, ZeRO-2, none": ROWS["7.6B full, ZeRO-2, none"],
    "7.6B full, ZeRO-1, full, twice": ROWS["7.6B full, ZeRO-1, full, twice"],
    "Mistral full, ZeRO-2, none": ROWS["Mistral full, ZeRO-2, none"],
    "32B LoRA, mlp": {**ROWS["32B LoRA, none"], "checkpointing": "select:mlp"},
    "Qwen3 8B full, mlp": {"model": (QWEN3_8B, 6), "gpus": "8xH200", "engine": "fsdp2", "checkpointing": "select:mlp"},
    "Gemma-2 9B LoRA, full": {"model": (GEMMA_9B, 8), "method": "lora", "engine": "ddp", "checkpointing": "full"},
    "Gemma-2 9B full, none": {"model": (GEMMA_9B, 6), "gpus": "8xH200", "engine": "fsdp2", "checkpointing": "none"},
    "7B Mamba full, none": ROWS["7B Mamba full, none"],
    "7B Mamba full, elementwise": {**ROWS["7B Mamba full, none"], "checkpointing": "select:elementwise"},
    "8B LoRA, elementwise, on the host": {**LORA, "checkpointing": "select:elementwise+offload"},
    "8B LoRA, mlp of 8, on the host": {**LORA, "checkpointing": "select:mlp+offload+layers:8"},
    "8B QLoRA, elementwise, on the host": {**LORA, "method": "qlora", "checkpointing": "select:elementwise+offload"},
    "8B LoRA, full, inputs on the host": {**LORA, "checkpointing": "full+offload"},
    "7.6B full, elementwise, on the host": {**ONE_OF_8, "checkpointing": "select:elementwise+offload"},
    "7B Mamba full, full, inputs on the host": {**ROWS["7B Mamba full, none"], "checkpointing": "full+offload"},
    "Mistral LoRA, elementwise": {"model": (MISTRAL_7B, 8), "method": "lora", "engine": "ddp", "seq": 4096,
                                  "checkpointing": "select:elementwise"},
}  # fmt: skip
"""Predicted when the first rows had been measured, and the model had learnt from them."""
AFTER: dict[str, dict[str, Any]] = {
    "7.6B full, ZeRO-1, full, twice, again": ROWS["7.6B full, ZeRO-1, full, twice"],
    "7.6B full, ZeRO-1, none, 2 rows": {**ONE_OF_8, "engine": "zero1", "checkpointing": "none", "micro_batch": 2},
    "7.6B full, ZeRO-2, elementwise": {**ONE_OF_8, "engine": "zero2", "checkpointing": "select:elementwise",
                                       "micro_batch": 2},
    "7.6B full, ZeRO-2, none, twice": {**ONE_OF_8, "engine": "zero2", "checkpointing": "none", "accum": 2},
    "Mistral full, ZeRO-1, mlp, twice": {"model": (MISTRAL_7B, 8), "gpus": "4xH200", "engine": "zero1", "seq": 4096,
                                         "checkpointing": "select:mlp", "accum": 2},
    "7B Mamba full, none, 4096": {**ROWS["7B Mamba full, none"], "checkpointing": "none", "seq": 4096},
    "7B Mamba full, none, 2 rows": {**ROWS["7B Mamba full, none"], "checkpointing": "none", "micro_batch": 2},
    "7B Mamba full, full, 2 rows": {**ROWS["7B Mamba full, none"], "checkpointing": "full", "micro_batch": 2},
    "7B Mamba full, elementwise, on the host": {**ROWS["7B Mamba full, none"],
                                                "checkpointing": "select:elementwise+offload"},
    "0.5B full, inputs on the host, FSDP2": {"model": (fast.QWEN_HALF_B, 24), "gpus": "4xH200", "engine": "fsdp2",
                                             "micro_batch": 8, "checkpointing": "full+offload"},
    "Qwen3 8B LoRA, mlp, on the host": {"model": (QWEN3_8B, 12), "method": "lora", "engine": "ddp", "micro_batch": 2,
                                        "checkpointing": "select:mlp+offload"},
    "Gemma-2 9B full, elementwise": {"model": (GEMMA_9B, 6), "gpus": "8xH200", "engine": "fsdp2",
                                     "checkpointing": "select:elementwise"},
}  # fmt: skip
"""Likewise when those of `LATER` had been."""
LLAMA_1B = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}  # fmt: skip
ONE_BILLION = {"model": (LLAMA_1B, 16), "gpus": "4xH200", "micro_batch": 4}
HALF_BILLION = {"model": (fast.QWEN_HALF_B, 24), "gpus": "4xH200", "micro_batch": 4}
MISTRAL = {"model": (MISTRAL_7B, 8), "gpus": "4xH200", "seq": 4096}
QWEN3 = {"model": (QWEN3_8B, 6), "gpus": "8xH200"}
MAMBA = ROWS["7B Mamba full, none"]
LAST: dict[str, dict[str, Any]] = {
    "8B LoRA, mlp, 3 rows": {**LORA, "micro_batch": 3, "checkpointing": "select:mlp"},
    "8B LoRA, qkv, 4096": {**LORA, "micro_batch": 1, "seq": 4096, "checkpointing": "select:qkv"},
    "8B LoRA, elementwise of 5, twice": {**LORA, "accum": 2, "checkpointing": "select:elementwise+layers:5"},
    "8B QLoRA, none": {**LORA, "method": "qlora", "checkpointing": "none"},
    "8B LoRA, ZeRO-2, elementwise": {**LORA, "engine": "zero2", "gpus": "4xH200",
                                     "checkpointing": "select:elementwise"},
    "1B full, FSDP2, none, twice": {**ONE_BILLION, "engine": "fsdp2", "checkpointing": "none", "accum": 2},
    "1B full, ZeRO-1, elementwise": {**ONE_BILLION, "engine": "zero1", "checkpointing": "select:elementwise"},
    "1B full, ZeRO-2, full, twice": {**ONE_BILLION, "engine": "zero2", "checkpointing": "full", "accum": 2},
    "1B full, one GPU, mlp": {**ONE_BILLION, "gpus": "1xH200", "engine": "ddp", "checkpointing": "select:mlp"},
    "0.5B full, ZeRO-1, none, twice": {**HALF_BILLION, "engine": "zero1", "checkpointing": "none", "accum": 2},
    "0.5B full, ZeRO-2, mlp, 4096": {**HALF_BILLION, "engine": "zero2", "seq": 4096, "checkpointing": "select:mlp"},
    "7.6B full, elementwise, 2 rows, twice": {**ONE_OF_8, "micro_batch": 2, "accum": 2,
                                              "checkpointing": "select:elementwise"},
    "7.6B full, ZeRO-1, elementwise, twice": {**ONE_OF_8, "engine": "zero1", "accum": 2,
                                              "checkpointing": "select:elementwise"},
    "7.6B full, ZeRO-2, mlp, 4096": {**ONE_OF_8, "engine": "zero2", "seq": 4096, "checkpointing": "select:mlp"},
    "Mistral full, FSDP2, none": {**MISTRAL, "engine": "fsdp2", "checkpointing": "none"},
    "Mistral full, ZeRO-2, elementwise, twice": {**MISTRAL, "engine": "zero2", "accum": 2,
                                                 "checkpointing": "select:elementwise"},
    "Qwen3 8B full, none, 2 rows": {**QWEN3, "engine": "fsdp2", "micro_batch": 2, "checkpointing": "none"},
    "Qwen3 8B full, ZeRO-2, mlp, twice": {**QWEN3, "engine": "zero2", "accum": 2, "checkpointing": "select:mlp"},
    "Qwen3 8B LoRA, elementwise, on the host, 4096": {"model": (QWEN3_8B, 12), "method": "lora", "engine": "ddp",
                                                      "seq": 4096, "checkpointing": "select:elementwise+offload"},
    "32B LoRA, elementwise, on the host": {**ROWS["32B LoRA, none"], "checkpointing": "select:elementwise+offload"},
    "7B Mamba full, elementwise, 2 rows": {**MAMBA, "micro_batch": 2, "checkpointing": "select:elementwise"},
    "7B Mamba full, full, twice": {**MAMBA, "accum": 2, "checkpointing": "full"},
    "7B Mamba LoRA, none": {**MAMBA, "gpus": "1xH200", "engine": "ddp", "method": "lora", "checkpointing": "none"},
    "Gemma-2 9B LoRA, elementwise": {"model": (GEMMA_9B, 10), "method": "lora", "engine": "ddp",
                                     "checkpointing": "select:elementwise"},
    "Gemma-2 9B full, full, 2 rows": {"model": (GEMMA_9B, 6), "gpus": "8xH200", "engine": "fsdp2", "micro_batch": 2,
                                      "checkpointing": "full"},
}  # fmt: skip
"""Likewise when those of `AFTER` had been."""
QWEN3_LORA = {"model": (QWEN3_8B, 12), "method": "lora"}
GEMMA_LORA = {"model": (GEMMA_9B, 10), "method": "lora", "engine": "ddp"}
GEMMA_FULL = {"model": (GEMMA_9B, 6), "gpus": "8xH200", "engine": "fsdp2"}
AGAIN: dict[str, dict[str, Any]] = {
    "8B LoRA, mlp of 4, 1024, 6 rows": {**LORA, "seq": 1024, "micro_batch": 6, "checkpointing": "select:mlp+layers:4"},
    "8B LoRA, ZeRO-2, none, twice": {**LORA, "engine": "zero2", "gpus": "4xH200", "accum": 2, "checkpointing": "none"},
    "8B LoRA, ZeRO-1, mlp": {**LORA, "engine": "zero1", "gpus": "4xH200", "checkpointing": "select:mlp"},
    "8B QLoRA, mlp, 4096": {**LORA, "method": "qlora", "micro_batch": 1, "seq": 4096, "checkpointing": "select:mlp"},
    "1B full, FSDP2, elementwise, 8 rows": {**ONE_BILLION, "engine": "fsdp2", "seq": 1024, "micro_batch": 8,
                                            "checkpointing": "select:elementwise"},
    "1B full, ZeRO-2, mlp, 8192": {**ONE_BILLION, "engine": "zero2", "seq": 8192, "micro_batch": 1,
                                   "checkpointing": "select:mlp"},
    "0.5B full, FSDP2, full, twice, 4096": {**HALF_BILLION, "engine": "fsdp2", "seq": 4096, "accum": 2,
                                            "checkpointing": "full"},
    "7.6B full, mlp of 4, twice": {**ONE_OF_8, "accum": 2, "checkpointing": "select:mlp+layers:4"},
    "7.6B full, none, twice": {**ONE_OF_8, "accum": 2, "checkpointing": "none"},
    "7.6B full, ZeRO-2, elementwise, twice": {**ONE_OF_8, "engine": "zero2", "accum": 2,
                                              "checkpointing": "select:elementwise"},
    "Mistral full, FSDP2, elementwise, twice": {**MISTRAL, "engine": "fsdp2", "accum": 2,
                                                "checkpointing": "select:elementwise"},
    "Mistral QLoRA, qkv": {**MISTRAL, "gpus": "1xH200", "method": "qlora", "engine": "ddp",
                           "checkpointing": "select:qkv"},
    "Qwen3 8B full, elementwise, on the host": {**QWEN3, "engine": "fsdp2",
                                                "checkpointing": "select:elementwise+offload"},
    "Qwen3 8B LoRA, FSDP2, none, 2 rows": {**QWEN3_LORA, "gpus": "4xH200", "engine": "fsdp2", "micro_batch": 2,
                                           "checkpointing": "none"},
    "32B LoRA, full, 4 rows": {**ROWS["32B LoRA, none"], "micro_batch": 4, "checkpointing": "full"},
    "7B Mamba full, inputs on the host, 2 rows": {**MAMBA, "micro_batch": 2, "checkpointing": "full+offload"},
    "7B Mamba LoRA, none, again": LAST["7B Mamba LoRA, none"],
    "7B Mamba LoRA, elementwise, 2 rows": {**LAST["7B Mamba LoRA, none"], "micro_batch": 2,
                                           "checkpointing": "select:elementwise"},
    "Gemma-2 9B LoRA, elementwise, 2 rows": {**GEMMA_LORA, "micro_batch": 2, "checkpointing": "select:elementwise"},
    "Gemma-2 9B full, none, 2 rows": {**GEMMA_FULL, "micro_batch": 2, "checkpointing": "none"},
}  # fmt: skip
"""Likewise when those of `LAST` had been."""
TWO_NODES = {"model": (QWEN_7B, 8), "gpus": "2x8xH200", "shard_within": 8}
ZERO3 = {"engine": "zero3", "compile": "off"}
GROUPS: dict[str, dict[str, Any]] = {
    "7.6B full, FSDP2 in groups of 8, mlp": {**TWO_NODES, "engine": "fsdp2", "checkpointing": "select:mlp"},
    "7.6B full, FSDP2 in groups of 8, none, twice": {**TWO_NODES, "engine": "fsdp2", "accum": 2,
                                                     "checkpointing": "none"},
    "7.6B full, FSDP2 in groups of 4, full": {**TWO_NODES, "engine": "fsdp2", "shard_within": 4,
                                              "checkpointing": "full"},
    "1B full, FSDP2 in groups of 4, none": {**ONE_BILLION, "gpus": "2x4xH200", "shard_within": 4, "engine": "fsdp2",
                                            "checkpointing": "none"},
    "1B full, FSDP2 in groups of 2, full, twice": {**ONE_BILLION, "gpus": "2x4xH200", "shard_within": 2, "accum": 2,
                                                   "engine": "fsdp2", "checkpointing": "full"},
    "8B LoRA, FSDP2 in groups of 4, elementwise": {**LORA, "gpus": "2x4xH200", "shard_within": 4, "engine": "fsdp2",
                                                   "checkpointing": "select:elementwise"},
    "7B Mamba full, FSDP2 in groups of 4, full": {**MAMBA, "gpus": "2x4xH200", "shard_within": 4,
                                                  "checkpointing": "full"},
    "7.6B full, ZeRO-3 in groups of 8, full": {**TWO_NODES, **ZERO3, "checkpointing": "full"},
    "7.6B full, ZeRO-3 in groups of 4, full, twice": {**TWO_NODES, **ZERO3, "shard_within": 4, "accum": 2,
                                                      "checkpointing": "full"},
    "1B full, ZeRO-3 in groups of 4, none": {**ONE_BILLION, **ZERO3, "gpus": "2x4xH200", "shard_within": 4,
                                             "checkpointing": "none"},
    "8B LoRA, ZeRO-3 in groups of 4, full": {**LORA, **ZERO3, "gpus": "2x4xH200", "shard_within": 4,
                                             "checkpointing": "full"},
}  # fmt: skip
"""One rank of two nodes, whose GPUs have a copy of the weights for each node, or for a part of one."""
LONG = {"compile": "off", "checkpointing": "full", "seq": 32_768}
SEQUENCES: dict[str, dict[str, Any]] = {
    "8B LoRA, FSDP2, 8 GPUs per sequence of 65536": {**LORA, **LONG, "gpus": "8xH200", "engine": "fsdp2", "seq": 65_536,
                                                     "micro_batch": 1, "sequence_parallel": 8},
    "8B LoRA, ZeRO-3, 4 GPUs per sequence": {**LORA, **LONG, "gpus": "8xH200", "engine": "zero3", "micro_batch": 1,
                                             "sequence_parallel": 4},
    "7.6B full, FSDP2, 4 GPUs per sequence": {**ONE_OF_8, **LONG, "sequence_parallel": 4},
    "7.6B full, FSDP2, 2 GPUs per sequence of 8192, none": {**ONE_OF_8, **LONG, "sequence_parallel": 2, "seq": 8192,
                                                            "checkpointing": "none"},
    "1B full, ZeRO-2, 4 GPUs per sequence, twice": {**ONE_BILLION, **LONG, "engine": "zero2", "micro_batch": 1,
                                                    "accum": 2, "sequence_parallel": 4},
    "1B full, FSDP2, 4 GPUs per sequence of 8192, 2 rows": {**ONE_BILLION, **LONG, "engine": "fsdp2", "micro_batch": 2,
                                                            "seq": 8192, "sequence_parallel": 4},
    "Qwen3 8B full, FSDP2, 4 GPUs per sequence, mlp": {**QWEN3, **LONG, "engine": "fsdp2", "sequence_parallel": 4,
                                                       "checkpointing": "select:mlp"},
    "7.6B full, FSDP2 in groups of 8, 4 GPUs per sequence": {**TWO_NODES, **LONG, "engine": "fsdp2",
                                                             "sequence_parallel": 4},
}  # fmt: skip
"""One rank of several that share each sequence."""
HALF_ON_DDP = {"model": (fast.QWEN_HALF_B, 24), "gpus": "8xH200", "engine": "ddp", "micro_batch": 1, "compile": "off",
                "checkpointing": "full"}  # fmt: skip
COMPRESSED: dict[str, dict[str, Any]] = {
    "0.5B full, DDP, PowerSGD": {**HALF_ON_DDP, "compress": "powersgd"},
    "0.5B full, DDP, PowerSGD, twice": {**HALF_ON_DDP, "compress": "powersgd", "accum": 2},
    "0.5B full, DDP, 1-bit Adam": {**HALF_ON_DDP, "compress": "onebit"},
    "1B full, DDP, 1-bit Adam": {**ONE_BILLION, "engine": "ddp", "micro_batch": 1, "compile": "off",
                                 "checkpointing": "full", "compress": "onebit"},
    "1B full, ZeRO-3, ZeRO++": {**ONE_BILLION, "engine": "zero3", "micro_batch": 1, "compile": "off",
                                "checkpointing": "full", "compress": "zeropp"},
    "8B LoRA, ZeRO-3, ZeRO++": {**LORA, "gpus": "8xH200", "engine": "zero3", "micro_batch": 1, "compile": "off",
                                "checkpointing": "full", "compress": "zeropp"},
}  # fmt: skip
"""One rank of several that send each other less."""
MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000,
           "sliding_window": None}  # fmt: skip
QWEN3_MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
             "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
             "num_experts_per_tok": 8, "vocab_size": 151_936, "tie_word_embeddings": False}  # fmt: skip
FEW = {"model": (MIXTRAL, 4), "gpus": "8xH200", "engine": "fsdp2", "compile": "off", "micro_batch": 2}
MANY = {"model": (QWEN3_MOE, 8), "gpus": "8xH200", "engine": "fsdp2", "compile": "off", "micro_batch": 2}
ON_ATTENTION = {"method": "lora", "lora_targets": "q_proj,k_proj,v_proj,o_proj"}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral full, experts on 2 GPUs, none": {**FEW, "expert_parallel": 2, "checkpointing": "none"},
    "Mixtral full, experts on 8 GPUs, full": {**FEW, "expert_parallel": 8, "micro_batch": 4, "checkpointing": "full"},
    "Mixtral full, experts on 4 GPUs, 2 layers, twice": {**FEW, "expert_parallel": 4, "accum": 2,
                                                         "checkpointing": "layers:2"},
    "Mixtral full, experts on 4 GPUs in groups of 8, full": {**FEW, "gpus": "2x8xH200", "shard_within": 8,
                                                             "expert_parallel": 4, "checkpointing": "full"},
    "Mixtral LoRA, experts on 4 GPUs, none": {**FEW, **ON_ATTENTION, "expert_parallel": 4, "checkpointing": "none"},
    "Mixtral full, all experts, full": {**FEW, "checkpointing": "full"},
    "Qwen3-MoE full, experts on 8 GPUs, none": {**MANY, "expert_parallel": 8, "checkpointing": "none"},
    "Qwen3-MoE full, experts on 4 GPUs, full, 4 rows": {**MANY, "expert_parallel": 4, "micro_batch": 4,
                                                        "checkpointing": "full"},
    "Qwen3-MoE LoRA, experts on 2 GPUs, full": {**MANY, **ON_ATTENTION, "expert_parallel": 2,
                                                "checkpointing": "full"},
}  # fmt: skip
"""One rank of several that share experts: the busiest, by what it is sent. One row beside them, of a rank that has all
experts, tells the model of these from that of sharing them."""
TILES = {**LONG, "mlp": "tiled", "micro_batch": 1}
TILED: dict[str, dict[str, Any]] = {
    "8B LoRA of 32768 tokens, in tiles": {**LORA, **TILES},
    "8B LoRA of 65536 tokens, in tiles, none": {**LORA, **TILES, "seq": 65_536, "model": (LLAMA_8B, 4),
                                                "checkpointing": "none"},
    "8B LoRA, ZeRO-3, 4 GPUs per sequence of 131072, in tiles": {**LORA, **TILES, "gpus": "8xH200", "engine": "zero3",
                                                                 "seq": 131_072, "sequence_parallel": 4},
    "7.6B full, FSDP2, of 32768 tokens, in tiles": {**ONE_OF_8, **TILES},
    "7.6B full, FSDP2, 4 GPUs per sequence of 131072, in tiles": {**ONE_OF_8, **TILES, "seq": 131_072,
                                                                  "sequence_parallel": 4},
    "1B full, ZeRO-2, 2 GPUs per sequence of 65536, in tiles": {**ONE_BILLION, **TILES, "engine": "zero2",
                                                                "seq": 65_536, "sequence_parallel": 2},
    "7.6B full, ZeRO-3, 4 GPUs per sequence of 65536, in tiles": {**ONE_OF_8, **TILES, "engine": "zero3",
                                                                  "seq": 65_536, "sequence_parallel": 4},
    "1B full, DDP, of 32768 tokens, in tiles": {**ONE_BILLION, **TILES, "engine": "ddp"},
}  # fmt: skip
"""MLPs in tiles of their tokens, in long sequences."""
SHARED = {"gpus": "8xH200", "engine": "fsdp2", "compile": "off"}
EIGHT = {**SHARED, "model": (LLAMA_8B, 8), "seq": 4096}
QWEN3_2B = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
TENSOR: dict[str, dict[str, Any]] = {
    "8B full, 2 GPUs per layer, none": {**EIGHT, "tensor_parallel": 2, "checkpointing": "none"},
    "8B full, 4 GPUs per layer, full, 4 rows": {**EIGHT, "tensor_parallel": 4, "micro_batch": 4,
                                                "checkpointing": "full"},
    "8B full, 8 GPUs per layer, none, plain loss, 2 rows": {**EIGHT, "tensor_parallel": 8, "micro_batch": 2,
                                                            "loss": "plain", "checkpointing": "none"},
    "8B full, 8 of 16 GPUs per layer, 4 layers, twice": {**EIGHT, "gpus": "2x8xH200", "tensor_parallel": 8,
                                                         "micro_batch": 4, "accum": 2, "checkpointing": "layers:4"},
    "8B full, 4 of 16 GPUs per layer, in groups of 8": {**EIGHT, "gpus": "2x8xH200", "shard_within": 8,
                                                        "tensor_parallel": 4, "micro_batch": 2, "accum": 2,
                                                        "checkpointing": "none"},
    "8B full, 8 GPUs per layer, 65536 tokens": {**EIGHT, "tensor_parallel": 8, "seq": 65_536, "checkpointing": "full"},
    "8B LoRA, 4 GPUs per layer, none": {**SHARED, "model": (LLAMA_8B, 12), "method": "lora", "tensor_parallel": 4,
                                        "micro_batch": 4, "checkpointing": "none"},
    "8B LoRA, 2 GPUs per layer, full, 32768 tokens": {**SHARED, "model": (LLAMA_8B, 12), "method": "lora",
                                                      "tensor_parallel": 2, "seq": 32_768, "checkpointing": "full"},
    "Qwen3 2B full, tied, 4 GPUs per layer, none, plain loss": {**SHARED, "model": (QWEN3_2B, 14), "tensor_parallel": 4,
                                                               "micro_batch": 4, "loss": "plain",
                                                               "checkpointing": "none"},
    "Qwen3 8B full, 4 of 4 GPUs per layer, full": {**SHARED, "model": (QWEN3_8B, 6), "gpus": "4xH200",
                                                   "tensor_parallel": 4, "micro_batch": 8, "checkpointing": "full"},
    "Qwen 7.6B full, 4 GPUs per layer, Liger": {**ONE_OF_8, "compile": "off", "kernels": "fused", "tensor_parallel": 4,
                                                "micro_batch": 4, "checkpointing": "none"},
    "8B full, 4 GPUs per layer, mlp, 2 rows": {**EIGHT, "tensor_parallel": 4, "micro_batch": 2,
                                               "checkpointing": "select:mlp"},
    "32B LoRA, 8 GPUs per layer, none": {**ROWS["32B LoRA, none"], **SHARED, "tensor_parallel": 8, "micro_batch": 8},
}  # fmt: skip
"""One rank of several that share each layer."""
ROW = {"model": (LLAMA_8B, 16), "gpus": "8xH200", "engine": "fsdp2", "pipeline_parallel": 4, "accum": 8}
LORA_ROW = {**ROW, "method": "lora", "micro_batch": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "8B full, a pipeline of 4, none": {**ROW, "gpus": "4xH200", "checkpointing": "none"},
    "8B full, a pipeline of 4 of 8, full, as written": {**ROW, "checkpointing": "full", "compile": "off"},
    "8B full, a pipeline of 4 of 8, 2 stages each, mlp": {**ROW, "stages_per_gpu": 2, "checkpointing": "select:mlp"},
    "8B full, a pipeline of 2 of 8, 2 layers of each": {**ROW, "pipeline_parallel": 2, "checkpointing": "layers:2",
                                                        "compile": "off"},
    "8B LoRA, a pipeline of 4 of 8, full, plain loss": {**LORA_ROW, "checkpointing": "full", "loss": "plain",
                                                        "compile": "off"},
    "8B LoRA, a pipeline of 8 of 16, none": {**LORA_ROW, "gpus": "2x8xH200", "pipeline_parallel": 8, "accum": 16,
                                             "checkpointing": "none"},
    "8B LoRA, a pipeline of 4, 2 stages each, none": {**LORA_ROW, "gpus": "4xH200", "stages_per_gpu": 2,
                                                      "checkpointing": "none"},
    "1B full, tied, a pipeline of 2 of 4, full": {**ONE_BILLION, "engine": "fsdp2", "pipeline_parallel": 2,
                                                  "accum": 4, "checkpointing": "full"},
    "1B full, tied, a pipeline of 4, none, as written": {**ONE_BILLION, "engine": "fsdp2", "pipeline_parallel": 4,
                                                         "accum": 8, "checkpointing": "none", "compile": "off"},
    "Qwen3 8B full, a pipeline of 2 of 8, elementwise": {"model": (QWEN3_8B, 8), "gpus": "8xH200", "engine": "fsdp2",
                                                         "pipeline_parallel": 2, "accum": 4,
                                                         "checkpointing": "select:elementwise"},
}  # fmt: skip
"""The fullest GPU of a pipeline, at the head of the row or at its end."""
PAIR = {**ROW, "tensor_parallel": 2, "compile": "off"}
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LARGE_PAIR = {"model": (LLAMA_70B, 8), "gpus": "4x8xH200", "engine": "fsdp2", "compile": "off", "tensor_parallel": 8,
              "pipeline_parallel": 4, "accum": 8}  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "8B full, a pipeline of 4 of 8, 2 GPUs per layer, none": {**PAIR, "checkpointing": "none"},
    "8B full, a pipeline of 2 of 8, 4 GPUs per layer, full, 4 rows": {**PAIR, "pipeline_parallel": 2,
                                                                      "tensor_parallel": 4, "micro_batch": 4,
                                                                      "checkpointing": "full"},
    "8B full, a pipeline of 2 of 16, 2 stages each, 2 GPUs per layer, in groups of 4, mlp": {
        **PAIR, "gpus": "2x8xH200", "pipeline_parallel": 2, "stages_per_gpu": 2, "shard_within": 4,
        "checkpointing": "select:mlp"},
    "70B full, a pipeline of 4 of 32, 8 GPUs per layer, 1 layer of each": {**LARGE_PAIR, "seq": 4096,
                                                                          "checkpointing": "layers:1"},
    "8B LoRA, a pipeline of 4 of 8, 2 GPUs per layer, none, plain loss": {**LORA_ROW, "compile": "off",
                                                                         "tensor_parallel": 2, "loss": "plain",
                                                                         "checkpointing": "none"},
    "1B full, tied, a pipeline of 2 of 4, 2 GPUs per layer, full": {**ONE_BILLION, "engine": "fsdp2", "compile": "off",
                                                                   "pipeline_parallel": 2, "tensor_parallel": 2,
                                                                   "accum": 4, "checkpointing": "full"},
    "8B full, a pipeline of 4 of 8, 2 GPUs per sequence, none": {**ROW, "sequence_parallel": 2, "compile": "off",
                                                                "checkpointing": "none"},
    "Mixtral full, a pipeline of 2 of 8, experts on 4 GPUs, full": {**FEW, "pipeline_parallel": 2, "accum": 4,
                                                                   "expert_parallel": 4, "checkpointing": "full"},
}  # fmt: skip
"""The fullest GPU of a pipeline whose stages have several GPUs for each layer, each sequence, or a layer's experts."""
LLAMA_3B = {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
            "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}  # fmt: skip
STREAMED = {"gpus": "1xH200", "engine": "stream", "compile": "off", "checkpointing": "full", "resident": 0}
STREAMED_3B = {**STREAMED, "model": (LLAMA_3B, 28), "seq": 8192, "accum": 4}
STREAMED_8B = {**STREAMED, "model": (LLAMA_8B, 12), "method": "lora", "accum": 8}
STREAM: dict[str, dict[str, Any]] = {
    "0.5B full, streamed": {**STREAMED, "model": (fast.QWEN_HALF_B, 24), "micro_batch": 4},
    "0.5B full, streamed, 16 times, none": {**STREAMED, "model": (fast.QWEN_HALF_B, 24), "accum": 16,
                                            "checkpointing": "none", "resident": 12},
    "0.5B full, streamed, compiled, half of the states on an NVMe": {
        **STREAMED, "model": (fast.QWEN_HALF_B, 24), "accum": 4, "compile": "layers", "offload_optimizer": "nvme",
        "nvme": "20GB", "nvme_path": "/tmp/tightfit-nvme", "host_ram": "9GiB"},
    "3B full, streamed, 4 times": STREAMED_3B,
    "3B full, streamed, 4 times, half stay, inputs on the host": {**STREAMED_3B, "resident": 14,
                                                                  "checkpointing": "full+offload"},
    "3B full, streamed, 4 times, compiled": {**STREAMED_3B, "compile": "layers"},
    "3B full, streamed, 8-bit moments, 10 layers": {**STREAMED_3B, "accum": 1, "states": "8bit",
                                                    "checkpointing": "layers:10", "seq": 4096},
    "7.6B full, streamed, untied, plain loss": {**STREAMED, "model": (QWEN_7B, 8), "loss": "plain", "accum": 4,
                                                "states": "bf16"},
    "8B LoRA, streamed, 8 times": STREAMED_8B,
    "8B LoRA, streamed, 16 times, inputs on the host": {**STREAMED_8B, "accum": 16, "checkpointing": "full+offload"},
    "8B LoRA, all layers stay, compiled, mlp": {**STREAMED_8B, "resident": 12, "compile": "layers", "accum": 2,
                                                "checkpointing": "select:mlp"},
    "8B LoRA, streamed, fp16, none": {**STREAMED_8B, "precision": "fp16", "accum": 2, "checkpointing": "none"},
    "8B QLoRA, streamed, 4 times": {**STREAMED_8B, "method": "qlora", "accum": 4},
    "Gemma-2 9B LoRA, streamed, 4 times": {**STREAMED, "model": (GEMMA_9B, 10), "method": "lora", "seq": 4096,
                                           "accum": 4},
    "7B Mamba full, streamed, 4 times": {**STREAMED, "model": (MAMBA_7B, 8), "scan": "tightfit", "accum": 4},
}  # fmt: skip
"""Layers that rest on the host: few slots, a window of micro batches, and of what stays none, half or all."""
SETS = {"first": ROWS, "later": LATER, "after": AFTER, "last": LAST, "again": AGAIN}
SETS |= {"groups": GROUPS, "sequences": SEQUENCES, "tiled": TILED, "pipelines": PIPELINES, "tensor": TENSOR}
SETS |= {"compressed": COMPRESSED}
SETS |= {"experts": EXPERTS, "pairs": PAIRS, "stream": STREAM}
USUAL = {"gpus": "1xH200", "compile": "layers", "loss": "fused", "micro_batch": 1, "accum": 1, "method": "full"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "predict", "run", "compare"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--limit-s", type=int, default=120)
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--rows", choices=tuple(SETS), default="first", help="which to prepare")
    parser.set_defaults(peers=False)
    args = parser.parse_args()
    fast.STEPS, fast.WARM_UP = 2, 1
    {"prepare": prepare, "predict": fast.predict, "run": fast.run, "compare": compare}[args.what](args)


def name_of(row: str) -> str:
    """Of its folder, and in what was measured."""
    return row.replace(" ", "_").replace(",", "")


def count_gpus(word: str) -> int:
    """Of `2x8xH200`."""
    return prod(map(int, word.split("x")[:-1]))


def predict_rank_s(row: dict[str, Any]) -> float:
    """By today's model what the rehearsed rank computes in a step, in a pipeline its own stages': a plan's own figure
    has what ranks send each other as well, and is the slowest GPU's."""
    said = next(each for rows in SETS.values() for name, each in rows.items() if name_of(name) == row["job"])
    config, layers = said["model"]
    shape = shape_from_config({**config, "num_hidden_layers": layers}, row["job"])
    hardware = read_hardware(said.get("gpus", USUAL["gpus"]))
    levers = {flag: value for flag, value in row["levers"].items() if flag in LEVERS}
    return pace(shape, levers_from_flags(levers, shape), hardware, rehearsal=True).step_s


def compare(args: argparse.Namespace) -> None:
    errors, apart = [], []
    for line in args.path.read_text().splitlines():
        row = json.loads(line)
        if "peak_gib" not in row:
            print(row["job"], "failed:", row.get("error", "")[-300:])
            continue
        errors.append(abs(row["predicted_peak_gib"] / row["peak_gib"] - 1))
        signed = row["predicted_peak_gib"] / row["peak_gib"] - 1
        rank_s, took_s = predict_rank_s(row), row["median_s"]
        apart.append(abs(rank_s / took_s - 1))
        print(f"{row['job']:45s} {row['peak_gib']:8.3f} → {row['predicted_peak_gib']:8.3f} GiB {signed:+.2%}", end="  ")
        print(f"{took_s:.4f} → {rank_s:.4f} s {rank_s / took_s - 1:+.1%}")
    if errors:
        within = sum(1 for error in errors if error <= 0.005)
        print(f"{len(errors)} rows, at most {max(errors):.2%}, {within} within 0.5 %", end="; ")
        print(f"seconds {median(apart):.1%} in the median, at most {max(apart):.1%}")


def prepare(args: argparse.Namespace) -> None:
    for name, row in SETS[args.rows].items():
        wanted = {**USUAL, **row}
        config, layers = wanted.pop("model")
        ranks = count_gpus(wanted["gpus"])
        readers = ranks // prod(wanted.get(name, 1) for name in READ_TOGETHER)
        wanted["effective_batch"] = wanted["micro_batch"] * wanted["accum"] * readers
        place = args.path / name_of(name) / "said"
        fast.write_plan(place, {"model": {**config, "num_hidden_layers": layers}, **wanted})
        if not (place / "worker.json").exists():
            sys.stderr.write(f"{name}: no plan\n")
            continue
        levers = json.loads((place / "worker.json").read_text())["levers"]
        for lever in ("compile", "engine", "loss", "kernels"):
            assert levers[lever] == wanted.get(lever, levers[lever]), (name, lever, levers[lever])


if __name__ == "__main__":
    main()
