"""The situations of the users' five notes, each with the plan that was reviewed and found right.

    python tests/planner/test_notes.py

writes `tests/data/plans/notes.json` anew; its diff is reviewed like code. Why each plan is right stands beside the
question, so that whoever sees a difference knows what to hold it against.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tightfit.hardware.words import parse_hardware
from tightfit.inputs.flags import checkpointing_word
from tightfit.job import Job
from tightfit.model.load import load_model
from tightfit.planner import plan
from tightfit.planner.plan import Plan
from tightfit.priced import strategy_name
from tightfit.types import Method

GOLDEN = Path(__file__).parents[1] / "data" / "plans" / "notes.json"
GIB = 2**30


class Situation(NamedTuple):
    model: str
    method: Method
    gpus: str
    host_ram: str
    why: str
    deepspeed_version: str | None = None


SITUATIONS: dict[str, Situation] = {
    "000 7b_mamba 6x32GB": Situation(
        "7b_mamba",
        "full",
        "6x32GB",
        "256GB",
        "16 bytes a parameter over six cards are 17 GiB of 32: everything stays on the GPUs, and what is left holds "
        "most activations: a few layers keep all of theirs, the others run their first projections again. The "
        "note offloads everything: then the host's optimizer is waited for.",
    ),
    "001 0.5B 1x4GB": Situation(
        "qwen1.5-0.5b",
        "lora",
        "1x4GB",
        "32GB",
        "0.9 GiB of frozen weights leave room for one sequence with few layers recomputing. The fused loss is what "
        "makes it fit: plain logits of a 152k vocabulary alone take 3.5 GiB a sequence.",
    ),
    "001 0.5B 1x8GB": Situation(
        "qwen1.5-0.5b", "lora", "1x8GB", "32GB", "Nothing recomputes, and the plain loss fits one sequence at a time."
    ),
    "001 0.5B 1x12GB": Situation(
        "qwen1.5-0.5b",
        "lora",
        "1x12GB",
        "32GB",
        "The same as on 8 GB: what more memory buys is too little to be sure of.",
    ),
    "001 0.5B 1x24GB": Situation(
        "qwen1.5-0.5b", "lora", "1x24GB", "32GB", "Two sequences in one pass with the plain loss, nothing recomputed."
    ),
    "001 1.8B 1x4GB": Situation(
        "qwen1.5-1.8b",
        "lora",
        "1x4GB",
        "32GB",
        "The weights alone are 3.4 GiB: they wait on the host, as in the note's `minimal`, but with all 2048 tokens.",
    ),
    "001 1.8B 1x8GB": Situation(
        "qwen1.5-1.8b", "lora", "1x8GB", "32GB", "The weights stay on the card; a third of the layers recompute."
    ),
    "001 1.8B 1x12GB": Situation("qwen1.5-1.8b", "lora", "1x12GB", "32GB", "One sequence a pass, nothing recomputed."),
    "001 1.8B 1x24GB": Situation(
        "qwen1.5-1.8b", "lora", "1x24GB", "32GB", "Two sequences in one pass, nothing recomputed."
    ),
    "002 7b_mamba 4x24GB": Situation(
        "7b_mamba",
        "full",
        "4x24GB",
        "256GB",
        "16 bytes a parameter over four cards are 26 GiB, more than a card has: the optimizer goes to the host. With "
        "the weights there as well, ZeRO-3's step is quicker than with the optimizer alone (measured).",
    ),
    "002 7b_mamba 6x24GB": Situation(
        "7b_mamba",
        "full",
        "6x24GB",
        "256GB",
        "17 GiB of state a card: FSDP2 keeps no flat copy of the gradients beside it and just fits with everything "
        "recomputed and the layers' inputs on the host; ZeRO-3 would need 25 GiB.",
    ),
    "002 7b_mamba 8x24GB": Situation(
        "7b_mamba", "full", "8x24GB", "256GB", "13 GiB of state a card: FSDP2 without any offload."
    ),
    "003 32B 8xK100": Situation(
        "qwen2.5-32b",
        "lora",
        "8xK100-64GB",
        "512GB",
        "Whole weights are 61 GiB, a little too much for 64 GB cards, so they are shared (7.6 GiB each); the rest buys "
        "activations. No FSDP2: the DTK's torch is too old. The note's offload and 512 tokens are not needed.",
        "0.14.2",
    ),
    "004 27B full 4xA100": Situation(
        "gemma-3-27b",
        "full",
        "4xA100-80GB",
        "512GB",
        "16 bytes a parameter over four cards are 102 GiB: weights and states wait on the host, which they fill to "
        "nine tenths, and stream. Four sequences pass a layer together, and a third of the layers keep all of theirs.",
    ),
    "004 27B full 4xA100, host of 256GB": Situation(
        "gemma-3-27b",
        "full",
        "4xA100-80GB",
        "256GB",
        "The optimizer's 12 bytes a parameter are 306 GiB: neither the cards nor this host have them. Seven cards "
        "would hold everything; pure bf16 or adapters would fit the four. 8-bit states miss the margin by 0.2 GiB.",
    ),
    "004 27B full 4x80GB": Situation(
        "gemma-3-27b",
        "full",
        "4x80GB",
        "512GB",
        "As on the A100, at rates that nobody stated; without a known architecture flash attention is not taken.",
    ),
    "004 27B LoRA 4x24GB": Situation(
        "gemma-3-27b",
        "lora",
        "4x24GB",
        "256GB",
        "One copy of the weights waits on the host for all four cards, and of what layers keep as much as leaves a "
        "tenth of the RAM: on the cards is room for two sequences a pass. 12.8 GiB of shared weights would fit too, if "
        "all layers recomputed and their inputs waited on the host.",
    ),
}


def planned(situation: Situation) -> Plan:
    version = situation.deepspeed_version
    levers = {} if version is None else {"deepspeed_version": version}
    job = Job(model=situation.model, method=situation.method, levers=levers)
    return plan(job, load_model(situation.model), parse_hardware(situation.gpus, host_ram=situation.host_ram))


def compact(answer: Plan) -> dict[str, Any]:
    """What a reviewer compares; small changes of a constant do not show."""
    told: dict[str, Any] = {"fits": answer.fits}
    if answer.chosen is None:
        told["remedies"] = [f"{remedy.allowance}: {strategy_name(remedy.way.levers)}" for remedy in answer.remedies]
        return told | {"gpus_needed": answer.gpus_needed}
    way = answer.chosen
    return told | {
        "strategy": str(strategy_name(way.levers)),
        "gpus": way.world,
        "checkpointing": checkpointing_word(way.levers.checkpointing),
        "loss": way.levers.loss,
        "attention": way.levers.attention,
        "batch": f"{way.levers.micro_batch} × {way.levers.accumulation}",
        "gpu_gib": round(way.footprint.gpu.required_bytes / GIB, 2),
        "host_gib": round(way.footprint.host.peak_bytes_per_node / GIB, 1),
        "step_s": float(f"{way.pace.step_s:.3g}"),
        "fits_too": sorted(str(strategy_name(other.levers)) for other in answer.alternatives if other.fits),
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if place % 4 else name for place, name in enumerate(SITUATIONS)]
)
def test_a_notes_situation_is_planned_as_reviewed(name: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    answer = planned(SITUATIONS[name])
    assert compact(answer) == golden[name], f"{SITUATIONS[name].why} If the new plan is better, write the golden anew."
    if answer.chosen is not None:
        assert answer.chosen.footprint.gpu.required_bytes <= answer.chosen.gpu_limit_bytes
        assert answer.chosen.levers.sequence == 2048
        assert answer.effective_batch == answer.chosen.effective_batch == 4 * answer.hardware.world


def test_no_golden_is_left_behind() -> None:
    assert list(json.loads(GOLDEN.read_text(encoding="utf-8"))) == list(SITUATIONS)


if __name__ == "__main__":
    plans = {name: compact(planned(situation)) for name, situation in SITUATIONS.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(told, ensure_ascii=False)}" for name, told in plans.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
