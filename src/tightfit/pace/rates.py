"""What a machine reaches: the constants of the pace model with their sources, and the rates that follow from them.

A rate comes from the best that is known: a finished run (`Hardware.taught`), the user's word on links and network,
`tightfit measure` (`Hardware.measured`), or what such machines reach where nothing was measured
(`hardware/reached.py`, with its sources). Each carries how far it may be off, and the pace has its range from that.

The constants below were measured on one H200 (torch 2.11, DeepSpeed 0.19.8) with 16 cores of an Intel Xeon beside it,
unless another source is named; `benchmarks/data/` has the figures. Those of kernels are shares or limits that are
carried over to other cards; those of the host's part in launching are scaled by `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from tightfit.hardware.reached import Reached, reached
from tightfit.memory.ssm import runs_cuda_scan
from tightfit.messages import Message
from tightfit.types import Gpu, Hardware, Levers, Precision, RateSource

# --- the GPU ------------------------------------------------------------------------------------

IN_STEP = {"sm_90": 1.0, "": 0.95}
"""Of what large products reach one by one, what they reach in a training step, between other kernels and with the card
warm, the limit of its power apart. sm_90: measured in the layers of twelve models. Others: published steps of
llm-foundry and torchtitan on A100s, up to 2048 tokens."""
PRODUCT_POWER = {"sm_90": 1.376, "": 1.0}
"""What products alone would draw at full clock, over what the card may draw. Measured on an H200: after a second of
nothing else they reach 690 of 790 TFLOP/s, and the clock goes with power to `CLOCK_BY_POWER`. Cards of other
architectures are taken to keep their clock, as far as the share that they reach does not have it already."""
OTHER_POWER = 0.64
"""Likewise of kernels that wait for memory. Assumed: 450 of 700 W; whole steps on the H200 agree with it."""
CLOCK_BY_POWER = 0.4
"""Power grows with clock and voltage, as the 2.5th power of the clock. Assumed: the usual figure near the limit."""
GROUPED_SHARE = 0.6
"""Of that, reached by the grouped product of a mixture of experts. Measured on one model."""
ROUTED_OPERATIONS = 4
"""Operations that the host launches, one by one, while the GPU waits for them: where experts are shared out it has to
know how many rows go where before it can go on. Read from the source, not measured."""
PRODUCT_START_S = 4e-6
"""Start and tail of one product, in which the card is not full: what makes small products slow. Measured."""
KERNEL_START_S = 1.5e-6
"""Likewise of a kernel that is no product, and the gap to the next. Measured."""

ATTENTION_SHARES = {
    "flash": {"sm_90": 0.35, "sm_100": 0.17, "sm_80": 0.72, "gfx942": 0.35, "": 0.85},
    "cudnn": {"sm_90": 0.69, "sm_100": 0.6, "": 0.6},
    "efficient": {"sm_90": 0.175, "sm_100": 0.09, "sm_80": 0.33, "": 0.4},
    "masked_cudnn": {"sm_90": 0.35, "sm_100": 0.3, "": 0.3},
    "masked_efficient": {"sm_90": 0.129, "sm_100": 0.065, "sm_80": 0.24, "": 0.3},
}
"""Of the stated peak, reached by each kernel on long sequences with heads of 128. sm_90: measured. sm_80 and flash on
GeForce: the FlashAttention-2 paper, 225 TFLOP/s on an A100, 335-350 on an H100, and its authors' figures for the 3090
and 4090. The others are taken to be as far from flash as on sm_90."""
DIAGONAL_TOKENS = 400
"""Keys that a causal kernel computes beyond half of them for each query, in blocks that the diagonal cuts, and what a
short sequence leaves idle. Measured: 285-530, from 1024 to 16384 tokens, cuDNN and flash."""
HEAD_SHARES = {32: 0.5, 64: 0.77, 80: 0.66, 96: 0.78, 112: 0.88}
"""What heads of other widths reach of it. Measured; narrower than 64 assumed."""
FLASH_HEAD_SHARES = {32: 0.6, 80: 0.84, 112: 0.92}
"""Likewise of flash, which pads less. Measured; 32 and 112 assumed."""
ATTENTION_BACK = {"flash": 2.7, "cudnn": 2.95, "efficient": 3.25, "masked_cudnn": 2.92, "masked_efficient": 2.55}
"""Time of attention's backward pass over its forward. Measured. Its arithmetic is 2.5 times."""
WIDE_EFFICIENT_BACK = 9.0
"""The same of PyTorch's memory-efficient kernel with heads wider than 128. Measured: 8.8-10.6."""

CASTING_BYTES_PER_S = 2.1e12
"""Casts between 16 and 32 bits on an H200, whose memory is faster than its kernels: bound by instructions. Measured."""
SOFTMAX_BYTES_PER_S = 2.0e12
"""Likewise the softmax of a vocabulary, forward. Measured."""
LOSS_BYTES_PER_S = 3.2e12
"""Likewise the fused loss's kernel, which reads logits twice and writes them once. Measured."""
CAPPED_LOSS_BYTES_PER_S = 2.05e12
"""The same with a soft cap. Measured."""
REDUCING_BYTES_PER_S = 2.5e12
"""Likewise means over rows. Measured."""
STRIDED_BYTES_PER_S = 1.05e12
"""Likewise kernels over parts of rows: rotary embedding, joining. Measured."""
FUSED_SHARE = 0.88
"""Of what a copy reaches, what the kernels reach that torch.compile makes of elementwise work and sums over rows.
Measured in the layers of four models: 3.3-4.2 of 4.1 TB/s forward, 3.1-4.0 backward."""
CLOCKS_OF_H200 = 989.4e12 / 4096
"""Multiprocessors times clock, to which those limits are proportional."""
FLOPS_PER_CLOCK = {
    "sm_70": 1024,
    "sm_75": 1024,
    "sm_80": 2048,
    "sm_86": 1024,
    "sm_89": 1024,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_120": 1024,
}
"""Of one multiprocessor's matrix units, 16-bit with fp32 sums; on GeForce cards half of it where others have 1024. The
architectures' white papers."""
FP32_SHARE = {"sm_80": 16, "sm_90": 16, "sm_100": 16}
"""How many times slower fp32 products are where matrix units do not help. Measured on sm_90: 46 TFLOP/s."""
FP32_ELSEWHERE = 2
"""The same on cards whose fp32 units are as many as a gaming card's. Data sheets."""

SCAN_STEPS_PER_S = {"official": 8e11, "tightfit": 1.1e12}
"""States times tokens times channels a second of a selective scan, forward. Measured."""
SCAN_STEPS_BACK_PER_S = {"official": 2.15e11, "tightfit": 2.9e11}
"""Likewise backward, ours by Triton's kernels. Measured. They are bound by exponentials, of which
cards do about equally many."""
CUDA_SCAN_STEPS_BACK_PER_S = 4.0e11
"""The same of our kernels in CUDA, which are for 16-bit inputs, 16 states and NVIDIA's cards from sm_80 on. Measured on
four shapes, channels last: 3.8-4.6e11 (h200-scan.jsonl)."""
TORCH_SCAN_S_PER_TOKEN = 0.32e-3
"""Of one layer, one pass and one position without a scan kernel, whatever the batch. Measured on two models."""
NF4_BYTES_PER_BANDWIDTH = 0.22
"""16-bit bytes that bitsandbytes unpacks a second over the stated memory bandwidth. Measured: 1056 GB/s."""

UNKNOWN_FLOPS, UNKNOWN_BANDWIDTH = 100e12, 0.8e12
"""A card whose rates nobody states. Assumed: between an RTX 3090 and a 4090."""

# --- the host's part in launching -----------------------------------------------------------------

OPERATION_S = 58e-6
"""Python, dispatcher and launch of one operation of a layer's tape (two kernels or so). Measured."""
MEASURED_LAUNCH_S = 66e-6
"""What `tightfit measure` finds for an operation on a host where these constants hold. Measured."""
LAUNCHES_ELSEWHERE = 0.5
"""Host seconds of other machines over those of the measured one, which is a slow virtual machine. Published: at 256 and
512 tokens, where launches are all, Qwen's README has 1.7-2.6 times the measured host's pace on A100s."""
CHECKPOINTED_LAYER_S = 0.5e-3
"""What checkpointing itself adds to a layer that runs again. Measured."""
CHOSEN_OPERATION_S = 70e-6
"""What torch's selective checkpointing adds to one operation of a layer that is not compiled, each time it runs: it
asks in Python whether its result is kept. Measured on one model."""
COMPILED_CALL_S = 0.75e-3
"""A compiled layer's forward beside its launches: guards, and the wrapper that autograd sees. Measured on four models,
as what follows."""
COMPILED_BACK_S = 1.2e-3
"""Likewise its backward."""
COMPILED_AGAIN_S = 0.9e-3
"""What both of them take more where recomputation is a part of the code."""
COMPILED_KERNEL_S = 15e-6
"""Each product, kernel or fused group of a compiled layer."""
SCAN_OPERATIONS = 11
"""Operations inside the fused Mamba function, which stands once on the tape. Counted."""
CHUNK_OPERATIONS = 12
"""Operations of the fused loss for each chunk, in torch. Counted."""
KERNEL_CHUNK_OPERATIONS = 6
"""The same with the kernel. Counted."""
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
SHARD_GUARD_S = 45e-6
"""What a compiled layer checks more for each of its parameters where FSDP2 has gathered it, forward. Measured on two
models."""
STREAM_CALL_S = 0.3e-3
"""What the streaming engine adds to a layer's pass with one micro batch: autograd is called for each. Assumed."""
STEP_PARAMETER_S = {"ddp": 20e-6, "zero0": 145e-6, "zero1": 90e-6, "zero2": 90e-6, "zero3": 100e-6, "fsdp2": 80e-6}
"""The optimizer step's work for each trainable tensor. Measured."""
OFFLOADED_GRADIENT_S = {"zero1": 0.4e-3, "zero2": 0.4e-3, "zero3": 0.2e-3, "fsdp2": 0.0}
"""The copy of one gradient to the host, its bytes apart. Measured."""
HEAD_OPERATIONS = 30
"""Operations of embedding, final norm, head and loss. Counted."""

# --- compiling ------------------------------------------------------------------------------------

COMPILE_START_S = 4.0
"""What the first compilation of a process takes more than others: the compiler is loaded, and its workers start.
Measured, as what follows, on the layers of four models, with and without adapters, by the host beside the H200
(`first_s` in h200-compiled.jsonl). Not scaled for other hosts: of their compilers a launch says nothing."""
COMPILE_CODE_S = 1.8
"""Each kind of layer, forward and backward."""
COMPILE_PRODUCT_S = 0.2
"""Each linear layer in it; an adapter is two more."""

# --- the host -----------------------------------------------------------------------------------

HOST_ADAM_BYTES = 28
"""Of host memory that one parameter's Adam step reads and writes: 131 GB/s at 4.7e9 parameters/s. Measured."""
HOST_PASS_SHARE = 0.46
"""Of the rate of Adam's bytes, what one plain pass over host memory reaches (norms, clipping). Measured: 60 GB/s."""
HOST_STEP_BYTES = 8
"""What unscaling and clipping read and write of each gradient on the host."""
ZERO3_STEP_BYTES = 22
"""What ZeRO-3 moves more for each parameter with its states on the host and its weights not. Measured: 0.36 ns."""
FSDP2_STEP_BYTES = 275
"""torch's own AdamW on the host, clipping included, as if it were bytes. Measured: 2.1 ns for each parameter."""
RENTED_CORES = 16
"""Of a server's processor for each GPU, where fewer GPUs than a server has are rented. The measured machine."""
NVME_READ_BYTES_PER_S, NVME_WRITE_BYTES_PER_S = 3e9, 2e9
"""One drive of a node. Assumed; measured on one rented machine: 2.4 and 1.6."""

# --- between GPUs ---------------------------------------------------------------------------------

COLLECTIVE_COST = 0.15
"""What collectives cost the computation beside which they run, of their own time: they take some of the GPU.
Assumed."""
HOST_COPY_COST = {"zero3": 0.3, "fsdp2": 1.0}
"""Likewise copies of weights from the host. Measured: FSDP2 hides none of them where they take longer than a layer."""
SENT_COST = 0.1
"""Likewise what layers keep, on its way to the host and back. Measured: with it a step that sends 26 of 32 layers is
predicted within 0.1 %."""
STREAM_COPY_COST = 0.03
"""Likewise everything that copies move beside layers that stream. Measured: 0.03, 0.03, 0.05 and 0.06 in four LoRA
steps, with all that else is wrong about them; their products alone took 1 % longer beside copies."""
COLLECTIVE_S = 30e-6
"""Latency of one collective inside a node. Assumed."""
NETWORK_COLLECTIVE_S = 80e-6
"""Likewise between nodes. Assumed."""

# --- how sure -------------------------------------------------------------------------------------

MEASURED_SPREAD = 0.03
"""Of a rate that was measured on this machine: what the same measurement differs by from one time to the next."""
MARKED_SPREAD = 0.3
"""Of one that was measured while something else kept the machine busy. Assumed."""
MODEL_SPREAD = 0.05
"""What the model leaves open of a step even where its rates are right. Measured on the H200: nine of ten steps."""
UNSEEN_SPREAD = 0.12
"""Likewise on a card on which nothing was measured, with software of another day. Published: four of five steps of the
rows of docs/published.md are inside the range that follows."""


class Card(NamedTuple):
    """What one GPU reaches in the working precision."""

    products: float  # FLOP/s of large matrix products, at full clock
    product_start_s: float
    power: float  # what they draw over what the card may draw
    flash: float  # FLOP/s of each attention kernel, without a mask those of the causal half alone
    cudnn: float
    efficient: float
    masked_cudnn: float
    masked_efficient: float
    memory: float  # bytes/s of its own memory
    casting: float
    softmax: float
    loss: float
    capped_loss: float
    reducing: float
    strided: float
    kernel_start_s: float
    unpacking: float  # bytes/s of 16-bit weights written from 4-bit ones
    scan_back: float  # steps/s of our scan backward, where its kernels in CUDA would do if the card runs them
    exchange: float = inf  # bytes/s of what ranks that share sequences or layers send each other inside of a layer
    exchange_start_s: float = 0.0
    travel: float = inf  # likewise of tokens on their way to the experts that other ranks own
    travel_start_s: float = 0.0


class Rates(NamedTuple):
    """What one rank of the machine reaches while all others do the same. Bytes/s, unless another unit is named."""

    card: Card
    launch: float  # host seconds over those of the measured host
    host_link: float  # between the card and host memory
    host_optimizer: float  # host memory that Adam reads and writes
    host_memory: float  # the same of copies, which want no cores
    link: float  # of a collective inside a node
    link_latency_s: float
    network: float  # of a collective between nodes
    network_latency_s: float
    nvme_read: float
    nvme_write: float


GROUPS = {
    "products": ("products", "product_start_s"),
    "attention": ("flash", "cudnn", "efficient", "masked_cudnn", "masked_efficient"),
    "memory": ("memory", "casting", "softmax", "loss", "capped_loss", "reducing", "strided", "kernel_start_s"),
    "unpacking": ("unpacking",),
    "launch": ("launch",),
    "host_link": ("host_link",),
    "host_optimizer": ("host_optimizer", "host_memory"),
    "link": ("link", "link_latency_s"),
    "network": ("network", "network_latency_s"),
    "nvme": ("nvme_read", "nvme_write"),
}
"""Rates that are right or wrong together, by the name under which a pace reports them."""


@dataclass(frozen=True, slots=True)
class Known:
    """How sure the rates of a group are."""

    value: float  # of the group's first
    source: RateSource
    spread: float
    on: str = ""


class Knowledge(NamedTuple):
    rates: Rates
    known: Mapping[str, Known]


def with_exchange(rates: Rates, hardware: Hardware, levers: Levers, *, rehearsal: bool = False) -> Rates:
    """The same for ranks of which some share sequences, layers or experts."""
    if rehearsal or levers.row_parts == levers.expert_parallel == 1:
        return rates

    def among(ranks: int, sharers: int) -> tuple[float, float]:
        """Bytes/s, and seconds before the first. `sharers`: GPUs of a node that share its network."""
        if ranks == 1:
            return inf, 0.0
        if hardware.nodes > 1 and hardware.gpus_per_node % ranks:
            return min(rates.link, rates.network / sharers), rates.network_latency_s
        return rates.link, rates.link_latency_s

    # Of what is sent to each rank its own, for a sequence or for experts, most leaves a node through its network,
    # together with what its other GPUs send; what is gathered and scattered for a layer passes it once, as in a ring.
    every = hardware.gpus_per_node
    speed, start = among(levers.row_parts, every if levers.sequence_parallel > 1 else 1)
    travel, travel_start = among(levers.expert_parallel, every)
    speeds = {"exchange": speed, "exchange_start_s": start, "travel": travel, "travel_start_s": travel_start}
    return rates._replace(card=rates.card._replace(**speeds))


def hand_over_s(rates: Rates, hardware: Hardware, gpus: int, size: int) -> float:
    """Seconds in which a GPU of a row of so many hands this much on to the next. Where nodes are several, some of it
    crosses from one to another, with that of all GPUs there which do the same."""
    beside = hardware.world // gpus
    if hardware.nodes == 1:
        return size / rates.link + rates.link_latency_s
    return size * min(beside, hardware.gpus_per_node) / rates.network + rates.network_latency_s


def rates_of(hardware: Hardware, precision: Precision, *, rehearsal: bool = False) -> Rates:
    """`rehearsal`: one rank alone poses as one of many, and shares the host with nobody."""
    return know_rates(hardware, precision, rehearsal=rehearsal).rates


@lru_cache(maxsize=512)
def know_rates(hardware: Hardware, precision: Precision, *, rehearsal: bool = False) -> Knowledge:
    gpu, ranks = hardware.gpu, 1 if rehearsal else hardware.gpus_per_node
    usual = reached(hardware)
    found = _Finder(hardware)
    card = _find_card(gpu, precision, usual, found)
    stated = _source_of(gpu)
    host_link = usual.host_link.value / (1 if ranks == 1 else usual.gpus_per_root.value)
    host_bytes = _find_host_bytes(hardware, usual, ranks)
    launch = 1.0 if _is_of_the_constants(gpu) else LAUNCHES_ELSEWHERE
    network: RateSource = "given" if hardware.network_bytes_per_s is not None else "assumed"
    rates = Rates(
        card=card,
        launch=found.take("launch_s", "launch", launch * MEASURED_LAUNCH_S, 0.4, "published") / MEASURED_LAUNCH_S,
        host_link=found.take(
            "host_link" if ranks == 1 else "host_link_together",
            "host_link",
            min(host_link, host_bytes / ranks),
            max(usual.host_link.spread, usual.gpus_per_root.spread if ranks > 1 else 0.0),
            stated,
        ),
        host_optimizer=found.take(
            "host_optimizer" if ranks == 1 else "host_optimizer_together",
            "host_optimizer",
            host_bytes / HOST_ADAM_BYTES,
            0.4,
            "assumed",
        )
        * HOST_ADAM_BYTES
        / ranks,
        host_memory=found.take("host_memory", "host_optimizer", usual.host_memory.value * usual.host_memory_share.value)
        / ranks,
        link=found.take(
            "link", "link", usual.link.value, usual.link.spread, "given" if hardware.link_given else stated
        ),
        link_latency_s=found.take("link_latency_s", "link", COLLECTIVE_S),
        network=found.take(
            "network",
            "network",
            usual.network.value * usual.network_share.value,
            max(usual.network.spread, usual.network_share.spread),
            network,
        ),
        network_latency_s=found.take("network_latency_s", "network", NETWORK_COLLECTIVE_S),
        nvme_read=found.take("nvme_read", "nvme", NVME_READ_BYTES_PER_S, 0.6, "assumed"),
        nvme_write=found.take("nvme_write", "nvme", NVME_WRITE_BYTES_PER_S),
    )
    for taught in hardware.taught.rates if hardware.taught else ():
        if taught.name in GROUPS:
            rates = slow_down(rates, taught.name, taught.factor)
            value = _first(rates, taught.name)
            found.known[taught.name] = Known(value, "run", taught.spread, hardware.taught.on if hardware.taught else "")
    return Knowledge(rates, found.known)


def find_model_spread(hardware: Hardware) -> float:
    """What the model leaves open of a step, its rates apart."""
    seen = hardware.measured is not None or _is_of_the_constants(hardware.gpu)
    return MODEL_SPREAD if seen else UNSEEN_SPREAD


def _is_of_the_constants(gpu: Gpu) -> bool:
    """Whether the constants were measured on such a machine."""
    return gpu.name.startswith("H200")


class _Finder:
    """Takes what was measured here, or else a default, and writes down which."""

    def __init__(self, hardware: Hardware) -> None:
        self.measured = hardware.measured
        # What the user says of a link is meant, whatever was measured there.
        self.said = {"link": hardware.link_given, "network": hardware.network_bytes_per_s is not None}
        self.known: dict[str, Known] = {}

    def find(self, name: str) -> float | None:
        value = self.measured.rates.get(name) if self.measured else None
        return value if value is not None and value > 0 else None

    def take(
        self, name: str, group: str, default: float, spread: float = 0.0, source: RateSource = "data sheet"
    ) -> float:
        """The first rate of a group decides how sure the group is."""
        value, measured = None if self.said.get(group) else self.find(name), self.measured
        if group not in self.known:
            if value is None or measured is None:
                self.known[group] = Known(default, source, spread)
            else:
                marked = MARKED_SPREAD if name in measured.marked else MEASURED_SPREAD
                self.known[group] = Known(value, "measured", marked, measured.on)
        return default if value is None else value


def _find_card(gpu: Gpu, precision: Precision, usual: Reached, found: _Finder) -> Card:
    half = gpu.bf16_flops or gpu.fp16_flops or UNKNOWN_FLOPS
    bandwidth = gpu.memory_bytes_per_s or UNKNOWN_BANDWIDTH
    stated = _source_of(gpu)
    peak = half
    if precision == "fp32":
        peak = half / FP32_SHARE.get(gpu.arch or "", FP32_ELSEWHERE)
    elif precision == "fp16":
        peak = gpu.fp16_flops or half
    elif gpu.bf16_flops is None and gpu.fp16_flops is not None:
        peak = half / 8  # no bf16 of its own: computed on the fp32 units of a card before Ampere
    spread = usual.products.spread if stated == "data sheet" else 0.6
    arch = gpu.arch or ""
    power = PRODUCT_POWER.get(arch, PRODUCT_POWER[""])
    in_step = peak * usual.products.value * IN_STEP.get(arch, IN_STEP[""])
    # `tightfit measure` keeps the card at products and nothing else.
    sustained = power**-CLOCK_BY_POWER
    products = found.take(f"products.{precision}", "products", in_step * sustained, spread, stated) / sustained
    clocks = _find_clocks(gpu)
    memory = found.take("memory_copy", "memory", bandwidth * usual.memory.value, usual.memory.spread, stated)

    def attend(kernel: str) -> float:
        shares = ATTENTION_SHARES[kernel]
        default = peak * min(shares.get(arch, shares[""]), usual.products.value)
        name = f"attention.{kernel}"
        if gpu.vendor == "cpu":  # which has not all of them: what it takes instead is no faster than its products
            default = min(default, products)
        elif precision == "fp32":
            name = ""  # a GPU's are measured in 16 bits
        # measured at 4096 tokens or so, where the diagonal takes its part
        whole = 1.0 if kernel.startswith("masked") else (2048 + DIAGONAL_TOKENS) / 2048
        return found.take(name, "attention", default / whole, max(spread, 0.15), stated) * whole

    return Card(
        products=products,
        product_start_s=found.take("product_start_s", "products", PRODUCT_START_S),
        power=power,
        flash=attend("flash"),
        cudnn=attend("cudnn"),
        efficient=attend("efficient"),
        masked_cudnn=attend("masked_cudnn"),
        masked_efficient=attend("masked_efficient"),
        memory=memory,
        casting=min(memory, found.take("memory_cast", "memory", CASTING_BYTES_PER_S * clocks)),
        softmax=min(memory, SOFTMAX_BYTES_PER_S * clocks),
        loss=min(memory, LOSS_BYTES_PER_S * clocks),
        capped_loss=min(memory, CAPPED_LOSS_BYTES_PER_S * clocks),
        reducing=min(memory, REDUCING_BYTES_PER_S * clocks),
        strided=min(memory, STRIDED_BYTES_PER_S * clocks),
        kernel_start_s=KERNEL_START_S,
        unpacking=found.take("unpacking", "unpacking", bandwidth * NF4_BYTES_PER_BANDWIDTH, 0.25, stated),
        scan_back=CUDA_SCAN_STEPS_BACK_PER_S if runs_cuda_scan(gpu) else SCAN_STEPS_BACK_PER_S["tightfit"],
    )


def _source_of(gpu: Gpu) -> RateSource:
    """Of rates that follow from what the maker states."""
    return "data sheet" if gpu.bf16_flops or gpu.fp16_flops else "assumed"


def _find_clocks(gpu: Gpu) -> float:
    """Multiprocessors times clock, over those of an H200; 1 where nobody states them."""
    half, per_clock = gpu.bf16_flops or gpu.fp16_flops, FLOPS_PER_CLOCK.get(gpu.arch or "")
    if half is None or per_clock is None:
        return 1.0
    geforce = gpu.name.startswith(("RTX 20", "RTX 30", "RTX 40", "RTX 50", "GTX"))
    return half / (per_clock / 2 if geforce else per_clock) / CLOCKS_OF_H200


def _find_host_bytes(hardware: Hardware, usual: Reached, ranks: int) -> float:
    """Of host memory that the optimizer steps of a node's ranks read and write together. Who rents a part of a server
    has a part of its cores."""
    cores = usual.cores.value
    if hardware.gpu.link in ("nvlink", "xgmi"):
        cores = min(cores, RENTED_CORES * ranks)
    return min(usual.host_memory.value * usual.host_memory_share.value, cores * usual.core_bytes_per_s.value)


def slow_down(rates: Rates, group: str, factor: float) -> Rates:
    """The rates of a group such that what hangs on them takes so many times as long."""
    changed: dict[str, float] = {}
    inside: dict[str, float] = {}
    for name in GROUPS[group]:
        where, values = (changed, rates._asdict()) if name in Rates._fields else (inside, rates.card._asdict())
        where[name] = values[name] * factor if name.endswith("_s") or name == "launch" else values[name] / factor
    card = rates.card._replace(**inside) if inside else rates.card
    return rates._replace(card=card, **changed)


def _first(rates: Rates, group: str) -> float:
    name = GROUPS[group][0]
    value: float = getattr(rates if name in Rates._fields else rates.card, name)
    return value


def assumptions(hardware: Hardware, levers: Levers) -> tuple[Message, ...]:
    """What had to be assumed about this way on this hardware."""
    gpu, said = hardware.gpu, []
    rates, known = know_rates(hardware, levers.precision)
    if gpu.bf16_flops is None and gpu.fp16_flops is None and known["products"].source == "assumed":
        unknown = {"tflops": UNKNOWN_FLOPS / 1e12, "tbytes": UNKNOWN_BANDWIDTH / 1e12}
        said.append(Message("price.unknown-rates", card=gpu.name, **unknown))
    if hardware.nodes > 1:
        if known["network"].source == "assumed":
            said.append(Message("price.network-rate", gbits=reached(hardware).network.value * 8 / 1e9))
    elif hardware.world > 1 and known["link"].source in ("data sheet", "assumed"):
        said.append(Message("price.link-rate", gbytes=rates.link / 1e9))
    if "nvme" in (levers.offload_optimizer, levers.offload_param) and known["nvme"].source == "assumed":
        said.append(Message("price.nvme-rate", read=rates.nvme_read / 1e9, write=rates.nvme_write / 1e9))
    return tuple(said)
