"""Head and loss on a GPU, forward and backward, by every way there is.

    python benchmarks/loss_gpu.py [--out benchmarks/data/h200-loss.jsonl] [--only errors|blocks|products|ways]

`plain` is Hugging Face's, `compiled` the same through torch.compile, `fused` ours, `torch` ours without its kernel,
`liger` Liger's where that is installed. Milliseconds are medians of device events, the ways in turn; bytes are what is
allocated at the peak beyond the hidden states and the head, with what is predicted of it beside. `errors` are of the
fused loss, its gradients of hidden states and head, and the same of the plain one: norms of the difference from
float64 over norms of the result, for a small shape in chunks. `blocks` are the kernel alone, `products` the head's
three products by the tokens of a chunk, in TFLOP/s: with both its constants were chosen.

In the recorded rows the kernel has blocks of 8192 columns, a frozen head's chunks are those of one that trains, and the
backward pass multiplies the gradients by 1, which the kernel leaves out since then. They come from one earlier run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad

from tightfit.memory.activations import setting_of
from tightfit.memory.loss import head_cost
from tightfit.model.load import shape_from_config
from tightfit.train import loss as ours
from tightfit.train.loss import Shaping, linear_cross_entropy
from tightfit.types import Gpu, Levers

SIZES = (
    (896, 151_936, 16_384, None),
    (4096, 128_256, 4096, None),
    (3584, 152_064, 2048, None),
    (3584, 256_000, 2048, 30.0),
    (5120, 152_064, 1024, None),
)
"""Width, vocabulary, tokens, cap."""
ROUNDS = 10
SMALL = (64, 5003, 303)  # width, vocabulary, tokens

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=PARTS)
    arguments = parser.parse_args()
    rows = []
    for row in (each for name, part in PARTS.items() if arguments.only in (None, name) for each in part()):
        rows.append(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **row}))
        print(rows[-1], flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


def speeds() -> Iterator[Row]:
    for hidden, vocab, tokens, cap in SIZES:
        for trains in (True, False):
            torch.manual_seed(0)
            states = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            head = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_(trains)
            labels = torch.randint(0, vocab, (1, tokens), device="cuda")
            steps = {}
            for name, compute in ways(states, head, labels, cap):
                steps[name] = stepper(compute, states, head)
                steps[name]()
            for name, times in timed(steps).items():
                states.grad = head.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                steps[name]()
                row: Row = {"way": name, "hidden": hidden, "vocab": vocab, "tokens": tokens, "cap": cap}
                row |= {"head_trains": trains, "ms": round(statistics.median(times), 3)}
                yield row | {
                    "peak_bytes": torch.cuda.max_memory_allocated() - before,
                    "predicted_bytes": predicted(name, hidden, vocab, tokens, cap, trains),
                }
            del states, head, labels, steps
            torch.compiler.reset()
            torch.cuda.empty_cache()


def ways(states: Tensor, head: Tensor, labels: Tensor, cap: float | None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    vocab, tokens = head.shape[0], float(labels.numel())
    shifted = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)

    def plain(states: Tensor, head: Tensor) -> Tensor:
        logits = linear(states, head)
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        loss: Tensor = ForCausalLMLoss(logits, labels, vocab, num_items_in_batch=tokens)
        return loss

    def fused() -> Tensor:
        return linear_cross_entropy(states, head, labels, tokens, shaping=Shaping(cap=cap))

    def without_kernel() -> Tensor:
        with patch.object(ours, "find_kernels", lambda tensor: None):
            return fused()

    compiled = torch.compile(plain)
    yield "plain", lambda: plain(states, head)
    yield "compiled", lambda: compiled(states, head)
    yield "fused", fused
    yield "torch", without_kernel
    with suppress(ImportError):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        flat = states.view(-1, states.shape[-1])
        yield "liger", lambda: Liger.apply(flat, head, shifted, None, None, -100, 0.0, 0.0, "sum", cap)[0] / tokens


def stepper(compute: Callable[[], Tensor], states: Tensor, head: Tensor) -> Callable[[], None]:
    def step() -> None:
        states.grad = head.grad = None
        compute().backward()

    return step


def timed(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            step()
            ended.record()
            torch.cuda.synchronize()
            times[name].append(began.elapsed_time(ended))
    return times


def predicted(way: str, hidden: int, vocab: int, tokens: int, cap: float | None, trains: bool) -> int | None:
    """None: of what is not priced as a head by itself."""
    if way == "compiled":
        return None
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 8}
    kind = {"model_type": "gemma2", "final_logit_softcapping": cap} if cap else {"model_type": "llama"}
    shape = shape_from_config({"vocab_size": vocab, **sizes, **kind}, "a head")
    card = Gpu(name="it", vendor="nvidia", arch="sm_90", memory_bytes=1, triton=way != "torch")
    levers = Levers(
        sequence=tokens,
        micro_batch=1,
        method="full" if trains else "lora",
        loss="plain" if way == "plain" else "fused",
        trainer="trainer" if way == "liger" else "tightfit",
    )
    cost = head_cost(shape, setting_of(levers, card), way != "plain", trains)
    states = 0 if way == "plain" and trains else tokens * hidden * 2  # counted with the loss, where nobody keeps them
    return max(cost.forward_logits - states, cost.backward_head)


def errors() -> Iterator[Row]:
    hidden, vocab, tokens = SMALL
    torch.manual_seed(0)
    values = [torch.randn(1, tokens, hidden), torch.randn(vocab, hidden) * 0.3, torch.randn(vocab)]
    labels = torch.randint(0, vocab, (1, tokens), device="cuda")
    labels[0, 20:90] = -100
    shifted = pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for cap in (None, 30.0):
            scale = 2.0**10 if dtype == torch.float16 else 1.0

            def plain(states: Tensor, head: Tensor, bias: Tensor, cap: float | None = cap) -> Tensor:
                logits = linear(states, head, bias).view(-1, vocab)
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                logits = logits if cap is None else torch.tanh(logits / cap) * cap
                return cross_entropy(logits, shifted, reduction="sum") / tokens

            def fused(states: Tensor, head: Tensor, bias: Tensor, cap: float | None = cap) -> Tensor:
                return linear_cross_entropy(states, head, labels, tokens, bias_V=bias, shaping=Shaping(cap=cap))

            found = {}
            for name, compute, precision in (
                ("exact", plain, torch.float64),
                ("fused", fused, dtype),
                ("plain", plain, dtype),
            ):
                own = [each.cuda().to(dtype).to(precision).requires_grad_() for each in values]
                with patch.object(ours, "fused_chunk_tokens", lambda *_, **__: 47):
                    loss = compute(*own)
                grads = torch.autograd.grad(loss * scale, own)
                found[name] = [loss.detach().double(), *(grad.double() / scale for grad in grads)]
            exact = found.pop("exact")
            yield {
                "errors": {
                    name: [float((a - b).norm() / b.norm()) for a, b in zip(each, exact, strict=True)]
                    for name, each in found.items()
                },
                "dtype": str(dtype).removeprefix("torch."),
                "cap": cap,
            }


def blocks() -> Iterator[Row]:
    from tightfit.train import loss_kernels

    one = torch.ones((), device="cuda")
    for tokens, vocab, cap in ((1280, 151_936, None), (768, 256_000, 30.0)):
        logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(0, vocab, (tokens,), device="cuda")
        for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16), (16_384, 32)):

            def turn(logits: Tensor = logits, labels: Tensor = labels, cap: float | None = cap) -> None:
                loss_kernels.losses_in_place(logits, labels, one, (1.0, cap), gradients=True)

            with patch.multiple(loss_kernels, BLOCK=block, WARPS=warps):
                turn()
                ms = statistics.median(timed({"kernel": turn})["kernel"])
            bytes_per_s = 3 * logits.nbytes / ms * 1000
            yield {"block": block, "warps": warps, "tokens": tokens, "vocab": vocab, "cap": cap} | {
                "ms": round(ms, 4),
                "bytes_per_s": round(bytes_per_s, -9),
            }


def products() -> Iterator[Row]:
    for hidden, vocab in ((896, 151_936), (4096, 128_256), (3584, 256_000)):
        head, grad = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for tokens in (441, 768, 1024, 1280, 2048, 4096):
            states, grad_states = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
            steps: dict[str, Callable[[], Any]] = {
                "logits": lambda a=states, b=head, out=logits: torch.mm(a, b.t(), out=out),
                "dhidden": lambda a=logits, b=head, out=grad_states: torch.mm(a, b, out=out),
                "dweight_add": lambda a=logits, b=states, out=grad: out.addmm_(a.t(), b),
                "dweight_set": lambda a=logits, b=states, out=grad: torch.mm(a.t(), b, out=out),
            }
            for step in steps.values():
                step()
            rate = 2 * tokens * vocab * hidden / 1e9
            found = {name: round(rate / statistics.median(times)) for name, times in timed(steps).items()}
            yield {"hidden": hidden, "vocab": vocab, "tokens": tokens, **found}


PARTS = {"errors": errors, "blocks": blocks, "products": products, "ways": speeds}


if __name__ == "__main__":
    main()
