"""What is said about bytes and seconds: where the peak is, and what had to be assumed."""

from tightfit.messages import Texts

TEXTS: Texts = {
    "peak-phase": ("The peak is in the {phase} phase, mostly {parts}.", "峰值出现在 {phase} 阶段，主要是 {parts}。"),
    "usable": (
        "Of the card's {card:.1f} GiB tensors can use {tensors:.1f}; the rest: context {context:.2f}{shared}, "
        "allocator slack {slack:.2f}.",
        "显卡的 {card:.1f} GiB 中张量可用 {tensors:.1f}；其余：上下文 {context:.2f}{shared}，分配器碎片 {slack:.2f}。",
    ),
    "communicator-share": (", communicator {size:.2f}", "，通信缓冲 {size:.2f}"),
    "init-is-largest": ("Initialisation takes more than training.", "初始化占用的显存比训练时更多。"),
    "flattens-on-gpu": (
        "DeepSpeed {version} flattens the weights on the GPU, next to them while it initialises.",
        "DeepSpeed {version} 初始化时在 GPU 上把权重展平，与原权重并存。",
    ),
    "flattens-on-host": (
        "DeepSpeed {version} flattens the weights on the host while it initialises.",
        "DeepSpeed {version} 初始化时在主机上把权重展平。",
    ),
    "unknown-rates": (
        "No rates of the {card} are known: it is taken to multiply at {tflops:.0f} TFLOP/s and to move {tbytes:.1f} "
        "TB/s, so its tokens a second compare ways, no more.",
        "{card} 的速率未知：按 {tflops:.0f} TFLOP/s 运算、{tbytes:.1f} TB/s 带宽估计，因此每秒 token 数只用于"
        "比较各方案。",
    ),
    "network-rate": (
        "The network is taken to carry {gbits:.0f} Gb/s for each node.",
        "假定每个节点的网络带宽为 {gbits:.0f} Gb/s。",
    ),
    "link-rate": (
        "The GPUs are taken to exchange {gbytes:.0f} GB/s each, which was not measured here.",
        "假定每张 GPU 的互连带宽为 {gbytes:.0f} GB/s，并未在此实测。",
    ),
    "nvme-rate": (
        "The NVMe is taken to read {read:.0f} and to write {write:.0f} GB/s.",
        "假定 NVMe 读 {read:.0f} GB/s、写 {write:.0f} GB/s。",
    ),
}
