"""The constants of the pace model, each with its source, and the rates of a card that follow from them.

Two sources. *Measured*: one H200 (torch 2.11, DeepSpeed 0.19.8) with 16 cores of an Intel Xeon beside it;
`benchmarks/measure_rates.py` and `benchmarks/measure_peaks.py` made the figures, which stand in
`benchmarks/data/`. *Assumed*: nobody measured it here; the plan says so where it matters.

A card's own peaks come from the catalogue. What share of them is reached was measured on the H200 alone and
is taken to be the same elsewhere; what the host costs (launches, hooks) is taken to be that of the measured host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tightfit.messages import Message
from tightfit.types import Gpu, Hardware, Levers, Precision

# --- the GPU ------------------------------------------------------------------------------------

PRODUCT_SHARE = 0.71
"""Of the stated peak, reached by large 16-bit matrix products. Measured: 690-790 of 989 TFLOP/s one by one, the
lower end of it within a training step."""
GROUPED_SHARE = 0.6
"""Of that, reached by the grouped product of a mixture of experts. Measured on one model."""
KERNEL_S = 4e-6
"""Start and tail of one product, in which the card is not full: what makes small products slow. Measured."""
ATTENTION_SHARE = 0.5
"""Of the stated peak, reached by flash attention at 4096 tokens and more. Measured: 415-600 TFLOP/s."""
MASKED_ATTENTION_SHARE = 0.25
"""Likewise by the kernel that a sliding window's mask falls back to. Measured on one model."""
ATTENTION_KERNEL_S = 40e-6
"""What a short sequence adds. Measured: 329 TFLOP/s at 2048 tokens, 70 at 512."""
ATTENTION_BACK = 3.3
"""Time of attention's backward pass over its forward. Measured: 2.9-3.7 (its arithmetic is 2.5 times)."""
TRAFFIC_SHARE = 0.62
"""Of the stated memory bandwidth, over copies (0.85), casts and softmaxes (0.42). Measured."""
FP32_SHARE = {"sm_80": 16, "sm_90": 16, "sm_100": 16}
"""How many times slower fp32 products are where matrix units do not help. Measured on sm_90: 46 TFLOP/s."""
FP32_ELSEWHERE = 2
"""The same on cards whose fp32 units are as many as a gaming card's. Data sheets."""

SCAN_STEPS_PER_S = {"official": 8e11, "tightfit": 1.1e12}
"""States times tokens times channels a second of a selective scan, forward. Measured."""
SCAN_STEPS_BACK_PER_S = {"official": 2.15e11, "tightfit": 2.9e11}
"""Likewise backward. Measured. They are bound by exponentials, of which cards do about equally many."""
TORCH_SCAN_S_PER_TOKEN = 0.32e-3
"""Of one layer, one pass and one position without a scan kernel, whatever the batch. Measured on two models."""
NF4_BYTES_PER_BANDWIDTH = 0.22
"""16-bit bytes that bitsandbytes unpacks a second over the stated memory bandwidth. Measured: 1056 GB/s."""

UNKNOWN_FLOPS, UNKNOWN_BANDWIDTH = 100e12, 0.8e12
"""A card whose rates nobody states. Assumed: between an RTX 3090 and a 4090."""

# --- the host's part in launching -----------------------------------------------------------------

OPERATION_S = 58e-6
"""Python, dispatcher and launch of one operation of a layer's tape (two kernels or so). Measured."""
CHECKPOINTED_LAYER_S = 0.5e-3
"""What checkpointing itself adds to a layer that runs again. Measured."""
SCAN_OPERATIONS = 11
"""Operations inside the fused Mamba function, which stands once on the tape. Counted."""
CHUNK_OPERATIONS = 12
"""Operations of the fused loss for each chunk. Counted."""
PACKED_LINEAR_S = 0.26e-3
"""What bitsandbytes adds to one 4-bit linear layer, each pass. Measured."""
MODULE_HOOKS_S = 0.44e-3
"""ZeRO-3's hooks around one module, each pass. Measured on full training and LoRA, 4 to 28 layers."""
GATHER_S = 0.1e-3
"""ZeRO-3's fetch of one parameter that is sharded, each pass. Measured with the above."""
FETCH_FROM_HOST_S = 0.25e-3
"""What the fetch adds where the shard waits on the host, its bytes apart. Measured."""
SHARD_GROUP_S = 1.2e-3
"""FSDP2's work around one group, each pass. Measured."""
STEP_PARAMETER_S = {"zero0": 145e-6, "zero1": 90e-6, "zero2": 90e-6, "zero3": 100e-6, "fsdp2": 80e-6}
"""The optimizer step's work for each trainable tensor. Measured."""
OFFLOADED_GRADIENT_S = {"zero1": 0.4e-3, "zero2": 0.4e-3, "zero3": 0.2e-3, "fsdp2": 0.0}
"""The copy of one gradient to the host, its bytes apart. Measured."""
HEAD_OPERATIONS = 30
"""Operations of embedding, final norm, head and loss. Counted."""

# --- the host -----------------------------------------------------------------------------------

HOST_ADAM_PARAMETERS_PER_S = 4.7e9
"""DeepSpeedCPUAdam on 16 cores: 131 GB/s of host memory. Measured. All ranks of a node share it."""
HOST_COPY_BYTES_PER_S = 60e9
"""One pass over host memory (norms, clipping). Measured. Shared likewise."""
HOST_STEP_BYTES = 8
"""What unscaling and clipping read and write of each gradient on the host."""
ZERO3_STEP_S_PER_PARAMETER = 0.36e-9
"""What ZeRO-3 adds for each parameter whose states are on the host while its weights are not. Measured."""
FSDP2_STEP_S_PER_PARAMETER = 2.1e-9
"""torch's own AdamW on the host, clipping included. Measured."""
HOST_LINK_SHARE = 0.88
"""Of PCIe's rate, reached by pinned copies. Measured: 55 of 63 GB/s."""
HOST_LINKS = {"pcie3": 15.8e9, "pcie4": 31.5e9, "pcie5": 63e9}
"""Bytes/s of sixteen lanes, one direction, after encoding. The standard."""
HOST_MEMORY_BYTES_PER_S = 131e9
"""What all GPUs of a node together can move to and from the host's memory. Measured through CPUAdam."""
NVME_READ_BYTES_PER_S, NVME_WRITE_BYTES_PER_S = 3e9, 2e9
"""One drive of a node. Assumed."""

# --- between GPUs ---------------------------------------------------------------------------------

LINK_SHARE = {"nvlink": 0.75, "xgmi": 0.7, "pcie3": 0.4, "pcie4": 0.4, "pcie5": 0.4}
"""Of the stated link rate, reached by collectives. Assumed: PCIe cards meet at bridges and mostly lack peer access."""
NETWORK_BYTES_PER_S = 12.5e9
"""Of one node. Assumed: 100 Gb/s."""
COLLECTIVE_COST = 0.15
"""What collectives cost the computation beside which they run, of their own time: they take some of the GPU.
Assumed."""
HOST_COPY_COST = {"zero3": 0.3, "fsdp2": 1.0}
"""Likewise copies of weights from the host. Measured: FSDP2 hides none of them where they take longer than a layer."""
COLLECTIVE_S = 30e-6
"""Latency of one collective inside a node. Assumed."""
NETWORK_COLLECTIVE_S = 80e-6
"""Likewise between nodes. Assumed."""


class Rates(NamedTuple):
    """What one card reaches."""

    products: float
    """FLOP/s of matrix products in the working precision."""
    attention: float
    masked_attention: float
    traffic: float
    """Bytes/s of its own memory."""
    unpacking: float
    """Bytes/s of 16-bit weights written from 4-bit ones."""


@lru_cache(maxsize=256)
def rates_of(gpu: Gpu, precision: Precision) -> Rates:
    bandwidth = gpu.memory_bytes_per_s or UNKNOWN_BANDWIDTH
    peak = half = gpu.bf16_flops or gpu.fp16_flops or UNKNOWN_FLOPS
    if precision == "fp32":
        peak = half / FP32_SHARE.get(gpu.arch or "", FP32_ELSEWHERE)
    elif precision == "fp16":
        peak = gpu.fp16_flops or half
    elif gpu.bf16_flops is None and gpu.fp16_flops is not None:
        peak = half / 8  # no bf16 of its own: computed on the fp32 units of a card before Ampere
    return Rates(
        products=peak * PRODUCT_SHARE,
        attention=peak * ATTENTION_SHARE,
        masked_attention=peak * MASKED_ATTENTION_SHARE,
        traffic=bandwidth * TRAFFIC_SHARE,
        unpacking=bandwidth * NF4_BYTES_PER_BANDWIDTH,
    )


@lru_cache(maxsize=256)
def host_link_of(gpu: Gpu) -> float:
    """Bytes/s between the card and host memory, one direction: PCIe, of the card's generation."""
    link, arch = gpu.link, gpu.arch or ""
    number = arch.removeprefix("sm_").rstrip("a")
    if link not in HOST_LINKS:
        # The card's link to other cards is another one; where the maker's word tells nothing, the fourth generation.
        link = "pcie5" if arch in ("gfx942", "gfx950") else "pcie4"
        if number.isdigit() and int(number) < 80:
            link = "pcie3"
        elif number.isdigit() and int(number) >= 90:
            link = "pcie5"
    return HOST_LINKS[link] * HOST_LINK_SHARE


def assumptions(hardware: Hardware, levers: Levers) -> tuple[Message, ...]:
    """What had to be assumed about this way on this hardware."""
    gpu, said = hardware.gpu, []
    if gpu.bf16_flops is None and gpu.fp16_flops is None:
        rates = {"tflops": UNKNOWN_FLOPS / 1e12, "tbytes": UNKNOWN_BANDWIDTH / 1e12}
        said.append(Message("price.unknown-rates", card=gpu.name, **rates))
    if hardware.nodes > 1:
        said.append(Message("price.network-rate", gbits=NETWORK_BYTES_PER_S * 8 / 1e9))
    elif hardware.world > 1:
        link = gpu.link or "pcie4"
        rate = LINK_SHARE[link] * (gpu.link_bytes_per_s or HOST_LINKS["pcie4"]) / 1e9
        said.append(Message("price.link-rate", gbytes=rate))
    if "nvme" in (levers.offload_optimizer, levers.offload_param):
        read, write = NVME_READ_BYTES_PER_S / 1e9, NVME_WRITE_BYTES_PER_S / 1e9
        said.append(Message("price.nvme-rate", read=read, write=write))
    return tuple(said)
