"""Loss curves with an optimizer whose states have fewer bits: a small Llama, on the processor.

    python benchmarks/states.py run              train every way that benchmarks/data/states.jsonl has not yet
    python benchmarks/states.py page             the curves and the table of docs/states.md
    python benchmarks/states.py page --check     exit 1 if the table is stale

A plain loop around `train/host_states.py`, which the streaming engine updates with: weights in bf16, gradients clipped,
AdamW. Passes compute in fp32 with these weights, as most processors have nothing faster, so that whatever differs comes
from the optimizer. All ways of a seed have the same first weights and the same batches; on one thread a run repeats bit
for bit. `nearest` is what pure 16 bits are without stochastic rounding: torch's AdamW on bf16 weights. `nudged` differs
from fp32 in one weight at the start, by one part in a hundred: what lies as close as that is noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from blocks import write_parts

from tightfit.train.config import OptimizerConfig

DATA = Path(__file__).parent / "data" / "states.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "states.md"
PICTURE = PAGE.parent / "images" / "states.svg"
TEXT = Path(__file__).parents[1] / "src" / "tightfit" / "train" / "data" / "shipped" / "stories.txt"
STEPS, TAIL, SEEDS, BATCH, SEQ = 200, 50, (0, 1, 2), 8, 64
TRAINING = OptimizerConfig(
    learning_rate=1e-3,
    schedule="cosine",
    warmup=0.05,
    epochs=None,
    max_steps=STEPS,
    weight_decay=0.1,
    clip=1.0,
    first_scale_power=None,
    seed=0,
)
MODEL = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": SEQ}
WAYS: dict[str, tuple[Any, bool]] = {
    "fp32": ("fp32", True),
    "fp32, nudged": ("fp32", True),
    "bf16": ("bf16", True),
    "8bit": ("8bit", True),
    "fp32, no copies": ("fp32", False),
    "bf16, no copies": ("bf16", False),
    "8bit, no copies": ("8bit", False),
    "nearest": (None, False),
}
"""Moments, and whether there are fp32 copies of the weights."""
BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 256, None: 4.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "page"))
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    args = parser.parse_args()
    if args.what == "page":
        rows = read_rows()
        if not args.check:
            draw(rows)
        return write_parts(PAGE, {"curves": table(rows)}, __file__, check=args.check)
    for seed in SEEDS:
        for way in WAYS:
            if (way, seed) not in read_rows():
                losses = train(way, seed)
                with DATA.open("a") as out:
                    out.write(json.dumps({"way": way, "seed": seed, "losses": losses}) + "\n")
                print(way, seed, losses[0], mean(losses[-TAIL:]), flush=True)
    return 0


def train(way: str, seed: int) -> list[float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tightfit.train.host_adam import Step
    from tightfit.train.host_states import HostStates
    from tightfit.train.optimizers import BETAS, EPS, clip, groups, learning_rate, set_rate

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**MODEL))
    found = groups(model, TRAINING.weight_decay)
    params = [param for group in found for param in group["params"]]
    wide = torch.cat([param.detach().view(-1) for param in params])
    gradients, sizes = torch.empty_like(wide), [param.numel() for param in params]
    weights = wide.to(torch.bfloat16)
    if way == "fp32, nudged":
        weights[-1] *= 1.01  # of the last norm
    for param, part, gradient in zip(params, wide.split(sizes), gradients.split(sizes), strict=True):
        param.data, param.grad = part.view(param.shape), gradient.view(param.shape)
    decays = [(sum(p.numel() for p in group["params"]), group["weight_decay"]) for group in found]
    parts = zip(weights.split([count for count, _ in decays]), decays, strict=True)
    nearest = torch.optim.AdamW(
        [{"params": [part], "weight_decay": decay} for part, (_, decay) in parts], lr=0.0, betas=BETAS, eps=EPS
    )
    states, master = WAYS[way]
    held = HostStates(
        decays, states or "fp32", master=master, allocate=lambda size: torch.zeros(size, dtype=torch.uint8)
    )
    held.start(weights)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    order, losses = torch.Generator().manual_seed(seed), []
    for step in range(STEPS):
        wide.copy_(weights)
        gradients.zero_()
        starts = torch.randint(0, text.numel() - SEQ, (BATCH, 1), generator=order)
        ids = text[starts + torch.arange(SEQ)]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(round(float(loss.detach()), 5))
        clip([gradients], TRAINING.clip, None)
        rate = learning_rate(TRAINING, step, STEPS)
        if states is not None:
            held.update(gradients, weights, Step(rate, step + 1, 1.0))
            continue
        set_rate(nearest, rate)
        for group, part in zip(nearest.param_groups, gradients.split([count for count, _ in decays]), strict=True):
            group["params"][0].grad = part.to(torch.bfloat16)
        nearest.step()
    return losses


# --- the page -------------------------------------------------------------------------------------


def read_rows() -> dict[tuple[str, int], list[float]]:
    lines = DATA.read_text().splitlines() if DATA.exists() else []
    return {(row["way"], row["seed"]): row["losses"] for row in map(json.loads, lines)}


def table(rows: dict[tuple[str, int], list[float]]) -> str:
    lines = [
        f"| way | bytes a parameter | mean loss of the last {TAIL} steps | apart | each seed apart |",
        "|---|---|---|---|---|",
    ]
    for way, (states, master) in WAYS.items():
        losses = [mean(rows[way, seed][-TAIL:]) for seed in SEEDS]
        apart = [loss / mean(rows["fp32", seed][-TAIL:]) - 1 for loss, seed in zip(losses, SEEDS, strict=True)]
        size, each = BYTES[states] + 2 + (4 if master else 0), ", ".join(f"{part:+.2%}" for part in apart)
        lines.append(f"| `{way}` | {size:.1f} | {mean(losses):.4f} | {mean(apart):+.2%} | {each} |")
    return "\n".join(lines)


def draw(rows: dict[tuple[str, int], list[float]]) -> None:
    """The loss of every way by step, the mean of all seeds, smoothed over ten steps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tightfit"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for way in WAYS:
        means = [mean(rows[way, seed][step] for seed in SEEDS) for step in range(STEPS)]
        smooth = [mean(means[max(0, step - 9) : step + 1]) for step in range(STEPS)]
        axes.plot(range(1, STEPS + 1), smooth, label=way, linewidth=1)
    axes.set(xlabel="step", ylabel="loss", ylim=(None, 4))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
