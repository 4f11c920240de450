"""What a Mamba layer keeps with our mixer: the tape against the real modules, fused and with adapters inside.

The sequences are shorter than a chunk of the scan, so that there is one state at a border.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kept import saved_bytes  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from tightfit.mamba.install import install, uninstall  # noqa: E402
from tightfit.memory.layers import layer_cost  # noqa: E402
from tightfit.memory.operations import Setting  # noqa: E402
from tightfit.model.load import shape_from_config  # noqa: E402

BATCH, SEQUENCE = 2, 48
SIZES = {"vocab_size": 97, "hidden_size": 64, "state_size": 8, "conv_kernel": 4, "expand": 2}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
RANK = 4
ADAPTED = {
    "": (),
    "x_proj": ("x_proj",),
    "in_proj and x_proj": ("in_proj", "x_proj"),
    "all": ("in_proj", "x_proj", "dt_proj"),
}


@pytest.fixture(autouse=True)
def _ours() -> Iterator[None]:
    install()
    yield
    uninstall()


def kept_by(family: str, layers: int, width: int, targets: tuple[str, ...]) -> int:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, num_hidden_layers=layers)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[width]).train()
    if targets:
        lora = LoraConfig(r=RANK, target_modules=list(targets))
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        for name, param in model.named_parameters():
            param.data = param.data.to(DTYPES[width]) if ".lora_" in name else param.data
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return saved_bytes(model, lambda: model(input_ids=ids, use_cache=False).logits)


@pytest.mark.thorough
@pytest.mark.parametrize("adapted", ADAPTED)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_what_a_layer_keeps(family: str, width: int, adapted: str) -> None:
    targets = ADAPTED[adapted]
    shape = shape_from_config({"model_type": family, **SIZES, "num_hidden_layers": 3}, "small")
    setting = Setting(
        micro_batch=BATCH,
        sequence=SEQUENCE,
        width=width,
        trains_base=not targets,
        scan="tightfit",
        lora_rank=RANK if targets else 0,
        lora_targets=targets or None,
        adapter_width=width,
    )
    one_more = kept_by(family, 3, width, targets) - kept_by(family, 2, width, targets)
    if not targets:  # the fused function keeps the scan's states on a GPU only
        one_more += BATCH * 2 * SIZES["hidden_size"] * SIZES["state_size"] * 4
    assert layer_cost(shape.blocks[0], shape.hidden_size, setting).saved == one_more
