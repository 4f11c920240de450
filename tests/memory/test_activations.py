"""The tapes against PyTorch itself: real Hugging Face layers, small, on the CPU and on the meta device.

Two instruments. Saved-tensor hooks see what autograd keeps: each storage is counted once, parameters and
buffers are left out. A dispatch mode sees every tensor come and go, so it knows what a layer holds at its worst
moment; since it hands tensors through Python, autograd does not add gradients in place under it, which is why
peaks are compared with a tolerance and a scan of many steps (mamba's) not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from tightfit.memory.attention import mask_bytes
from tightfit.memory.layers import layer_cost, layer_input_bytes
from tightfit.memory.operations import Operations, Setting
from tightfit.memory.ssm import mamba1
from tightfit.memory.tape import LayerCost, Slot, measure
from tightfit.model.load import shape_from_config
from tightfit.types import Attention, Block, Mamba1, ModelShape, Tensor, Traced

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

DENSE: dict[str, object] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, object] = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT2: dict[str, object] = {
    "vocab_size": 97,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 512,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCAN: dict[str, object] = {
    key: value for key, value in DENSE.items() if key in ("vocab_size", "hidden_size") or key.endswith("token_id")
}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", **DENSE},
    "mistral": {"model_type": "mistral", **DENSE},
    "ministral": {"model_type": "ministral", **DENSE, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **DENSE},
    "qwen3": {"model_type": "qwen3", **DENSE, "head_dim": 32},
    "phi3": {"model_type": "phi3", **DENSE},
    "phi3-whole-heads": {"model_type": "phi3", **DENSE, "num_key_value_heads": 4},
    "gemma": {"model_type": "gemma", **DENSE, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", **DENSE, "head_dim": 32},
    "gemma3_text": {"model_type": "gemma3_text", **DENSE, "head_dim": 32},
    "granite": {"model_type": "granite", **DENSE},
    "olmo2": {"model_type": "olmo2", **DENSE},
    "olmo3": {"model_type": "olmo3", **DENSE},
    "smollm3": {"model_type": "smollm3", **DENSE},
    "smollm3-unrotated": {"model_type": "smollm3", **DENSE, "no_rope_layers": [0, 0]},
    "starcoder2": {"model_type": "starcoder2", **DENSE},
    "stablelm": {"model_type": "stablelm", **DENSE},
    "stablelm-parallel": {"model_type": "stablelm", **DENSE, "use_parallel_residual": True},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt_neox": {"model_type": "gpt_neox", **DENSE},
    "gpt_neox-sequential": {"model_type": "gpt_neox", **DENSE, "use_parallel_residual": False},
    "mixtral": {"model_type": "mixtral", **DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 32},
    "mamba": {"model_type": "mamba", **SCAN, "state_size": 8},
    "falcon_mamba": {"model_type": "falcon_mamba", **SCAN, "state_size": 8},
    "mamba2": {
        "model_type": "mamba2",
        **SCAN,
        "state_size": 12,
        "num_heads": 16,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 20,
    },
}
SCANS = ("mamba", "falcon_mamba", "mamba2")
SHAPES = ((2, 24), (1, 40), (3, 17))
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setting_of(batch: int, sequence: int, width: int, attention: str = "sdpa", **others: Any) -> Setting:
    return Setting(
        micro_batch=batch,
        sequence=sequence,
        width=width,
        trains_base=others.pop("trains_base", True),
        attention=attention,  # type: ignore[arg-type]
        scan="torch",
        on_gpu=False,
        **others,
    )


def shape_of(config: Mapping[str, object], layers: int) -> ModelShape:
    return shape_from_config(_with_layers(config, layers), "small")


def cost_of(config: Mapping[str, object], setting: Setting, layer: int = 1) -> LayerCost:
    shape = shape_of(config, 2)
    return layer_cost(shape.blocks[shape.pattern[layer]], shape.hidden_size, setting)


def _with_layers(config: Mapping[str, object], layers: int) -> dict[str, object]:
    sized = {**config, "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers": layers}
    if "no_rope_layers" in sized:
        sized["no_rope_layers"] = [0] * layers
    return sized


@cache
def family_model(family: str, layers: int, width: int, attention: str) -> Any:
    """Shared by the tests that leave a model as it was."""
    return build(FAMILIES[family], layers, width, attention)


def build(config: Mapping[str, object], layers: int, width: int, attention: str) -> Any:
    sized = _with_layers(config, layers)
    real = transformers.AutoConfig.for_model(sized.pop("model_type"), **sized)
    real._attn_implementation = "eager" if config["model_type"] in SCANS else attention
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(real, dtype=DTYPES[width]).train()


# --- instruments --------------------------------------------------------------------------------


def key_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def saved_storages(run: Callable[[], Any], leave_out: set[int]) -> dict[int, int]:
    """Bytes of every storage that autograd keeps while `run` runs."""
    seen: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        if key_of(tensor) not in leave_out:
            seen[key_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return seen


def own_storages(model: Any) -> set[int]:
    return {key_of(tensor) for tensor in (*model.parameters(), *model.buffers())}


def saved_by_model(model: Any, batch: int, sequence: int) -> int:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return sum(saved_storages(lambda: model(input_ids=ids, use_cache=False).logits, own_storages(model)).values())


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that were made under it and are still there."""

    def __init__(self, leave_out: set[int]) -> None:
        super().__init__()
        self.leave_out = leave_out
        self.storages: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def now(self) -> int:
        for key in [key for key, (weak, _) in self.storages.items() if weak.expired()]:
            del self.storages[key]
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and key_of(tensor) not in self.leave_out:
                storage = tensor.untyped_storage()
                self.storages.setdefault(key_of(tensor), (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.now())
        return out


class _Top(torch.autograd.Function):  # type: ignore[misc]
    """Stands for the layers above: gives the layer's output a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.like = (x.shape, x.dtype, x.device)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device)


class _Bottom(torch.autograd.Function):  # type: ignore[misc]
    """Stands for the layers below: takes the gradient of the layer's input away."""

    @staticmethod
    def forward(ctx: Any, leaf: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None


class _Stop(Exception):
    pass


@dataclass(frozen=True)
class Call:
    """A layer, and what the model would call it with."""

    layer: Any
    x: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, device: str) -> Call:
        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, torch.Tensor) else value

        args, kwargs = tree_map(move, (self.args, self.kwargs))
        return Call(self.layer.to(device), move(self.x), args, kwargs)

    def leave_out(self) -> set[int]:
        outside = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]
        return own_storages(self.layer) | {key_of(tensor) for tensor in outside}

    def __call__(self, x: Any) -> Any:
        out = self.layer(x, *self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def call_of(model: Any, batch: int, sequence: int, block: Block, positions: Any = None) -> Call:
    """The arguments of the first layer, taken from a run of the model."""
    base = model.base_model
    layer = (base.h if hasattr(base, "h") else base.layers)[0]
    taken: dict[str, Any] = {}

    def take(module: Any, args: Any, kwargs: Any) -> None:
        taken.update(args=args, kwargs=kwargs)
        raise _Stop

    handle = layer.register_forward_pre_hook(take, with_kwargs=True)
    with pytest.raises(_Stop):
        model(input_ids=torch.zeros(batch, sequence, dtype=torch.long), use_cache=False, position_ids=positions)
    handle.remove()
    x = taken["args"][0].detach()
    return Call(layer, x.float() if block.residual_fp32 else x, taken["args"][1:], taken["kwargs"])


@dataclass(frozen=True)
class Found:
    saved: int
    forward: int
    backward: int


def found_in(call: Call, *, keep_grads: bool = False) -> Found:
    """One real layer, forwards and backwards."""
    hooks = []
    for parameter in call.layer.parameters():
        if parameter.requires_grad and not keep_grads:
            hooks.append(parameter.register_post_accumulate_grad_hook(_drop))
    leave_out = call.leave_out()
    mode = Live(leave_out | {key_of(call.x)})
    leaf = torch.zeros(1, device=call.x.device, requires_grad=True)
    outputs: list[Any] = []
    x = _Bottom.apply(leaf, call.x)
    with mode:
        saved = saved_storages(lambda: outputs.append(call(x)), leave_out)
        of_input = call.x.untyped_storage().nbytes() if key_of(x) in saved else 0
        forward, mode.peak = mode.peak, 0
        top = _Top.apply(outputs.pop())
        mode.peak = 0
        top.backward()
    for hook in hooks:
        hook.remove()
    call.layer.zero_grad(set_to_none=True)
    return Found(sum(saved.values()), forward + of_input, mode.peak + of_input)


def _drop(parameter: Any) -> None:
    parameter.grad = None


def unsaved_peak(call: Call) -> int:
    mode = Live(call.leave_out() | {key_of(call.x)})
    with torch.no_grad(), mode:
        call(call.x)
    return mode.peak


def relative(got: int, want: int) -> float:
    return got / want - 1


# --- what autograd keeps ------------------------------------------------------------------------


def attentions_of(family: str) -> tuple[str, ...]:
    return ("eager",) if family == "gemma2" or family in SCANS else ("sdpa", "eager")


CASES = [(family, attention) for family in FAMILIES for attention in attentions_of(family)]


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_bytes_of_a_layer(family: str, attention: str, width: int) -> None:
    """What a second layer adds to a model of one."""
    config = FAMILIES[family]
    one, two = (family_model(family, layers, width, attention) for layers in (1, 2))
    for batch, sequence in SHAPES:
        real = saved_by_model(two, batch, sequence) - saved_by_model(one, batch, sequence)
        cost = cost_of(config, setting_of(batch, sequence, width, attention))
        assert abs(relative(cost.saved, real)) < 0.01, (batch, sequence, cost.saved, real)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3_text", "gpt2", "qwen2_moe")), "mamba"],
)
@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpointed_layer_keeps_its_input(family: str, width: int) -> None:
    """Hooks do not see what checkpointing keeps, so this counts what is still there after the forward pass."""
    config = FAMILIES[family]
    kept = []
    for layers in (2, 3):
        model = build(config, layers, width, "sdpa")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mode = Live(own_storages(model))
        with mode:
            logits = model(input_ids=torch.zeros(2, 24, dtype=torch.long), use_cache=False).logits
            kept.append(mode.now())
        del logits
        gc.collect()
    shape = shape_of(config, 3)
    stream = layer_input_bytes(shape.blocks[shape.pattern[-1]], shape.hidden_size, setting_of(2, 24, width))
    assert kept[1] - kept[0] == stream


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "phi3", "stablelm", "gemma3_text"])
@pytest.mark.parametrize("width", DTYPES)
def test_saved_bytes_of_the_matrix_product_fallback(family: str, width: int) -> None:
    """What `sdpa` does where no fused kernel takes grouped heads: in fp32, or on cards before sm_80."""
    config = FAMILIES[family]
    shape = shape_of(config, 1)
    for batch, sequence in SHAPES:
        call = call_of(family_model(family, 1, width, "sdpa"), batch, sequence, shape.blocks[0])
        with sdpa_kernel(SDPBackend.MATH):
            real = found_in(call)
        cost = cost_of(config, setting_of(batch, sequence, width, flash_capable=False), layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "phi3"])
@pytest.mark.parametrize("width", DTYPES)
def test_saved_bytes_of_the_matrix_product_fallback_under_a_mask(family: str, width: int) -> None:
    """bf16 on a card before sm_80, or a card of AMD's without fused kernels: transformers repeats grouped heads."""
    config = {**FAMILIES[family], "sliding_window": 16}
    shape = shape_of(config, 1)
    for batch, sequence in ((2, 32), (1, 64)):
        call = call_of(build(config, 1, width, "sdpa"), batch, sequence, shape.blocks[0])
        with sdpa_kernel(SDPBackend.MATH):
            real = found_in(call)
        setting = replace(setting_of(batch, sequence, width, flash_capable=False), fused_capable=False)
        cost = cost_of(config, setting, layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01
        assert abs(relative(cost.backward, real.backward)) < 0.05


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "gpt2", "qwen2_moe", "mamba2"])
@pytest.mark.parametrize("width", DTYPES)
def test_the_lowest_layer_that_trains_keeps_less(family: str, width: int) -> None:
    """Where nothing below trains, no gradient leaves the layer, and what only that one needs is not kept."""
    config, shape = FAMILIES[family], shape_of(FAMILIES[family], 1)
    block = shape.blocks[0]
    for batch, sequence in SHAPES:
        call = call_of(family_model(family, 1, width, "eager"), batch, sequence, block)
        real = sum(saved_storages(lambda call=call: call(call.x), call.leave_out()).values())
        setting = setting_of(batch, sequence, width, "eager")
        cost = layer_cost(block, shape.hidden_size, setting, input_grad=False)
        assert abs(relative(cost.saved, real)) < 0.01, (batch, sequence, cost.saved, real)
        assert cost.saved <= cost_of(config, setting, layer=0).saved
        assert cost.input_grad == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "llama", "gemma2", "gemma3_text"])
def test_the_mask_of_a_pass(family: str, attention: str) -> None:
    """A window as long as the sequence hides nothing, and still brings a mask."""
    config = {**FAMILIES[family], **({} if family == "llama" else {"sliding_window": 24})}
    shape = shape_of(config, 1)
    mixer = shape.blocks[0].mixer
    assert isinstance(mixer, Attention)
    for batch, sequence in ((2, 23), (2, 24), (1, 40)):
        made = "eager" if family == "gemma2" else attention  # it falls back by itself
        mask = call_of(build(config, 1, 2, made), batch, sequence, shape.blocks[0]).kwargs["attention_mask"]
        real = 0 if mask is None else mask.untyped_storage().nbytes()
        assert mask_bytes(mixer, setting_of(batch, sequence, 2, attention)) == real, (batch, sequence)


def in_documents(batch: int, sequence: int) -> torch.Tensor:
    """Positions of three documents in each row, with borders of its own."""
    rows = []
    for row in range(batch):
        first, second = sequence // 3 + row, sequence // 2 + row
        rows.append([*range(first), *range(second - first), *range(sequence - second)])
    return torch.tensor(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "llama", "gemma3_text", "qwen3"])
def test_the_mask_of_packed_documents(family: str, attention: str) -> None:
    shape = shape_of(FAMILIES[family], 1)
    mixer = shape.blocks[0].mixer
    assert isinstance(mixer, Attention)
    for batch, sequence in ((1, 24), (3, 40)):
        model = build(FAMILIES[family], 1, 2, attention)
        mask = call_of(model, batch, sequence, shape.blocks[0], in_documents(batch, sequence)).kwargs["attention_mask"]
        setting = replace(setting_of(batch, sequence, 2, attention), packed=True)
        assert mask_bytes(mixer, setting) == mask.untyped_storage().nbytes()


@pytest.mark.thorough
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_packed_documents_cost_grouped_heads_and_a_mask_a_layer(family: str) -> None:
    shape = shape_of(FAMILIES[family], 1)
    for batch, sequence in ((2, 32), (1, 64)):
        model = build(FAMILIES[family], 1, 2, "meta_efficient")
        call = call_of(model, batch, sequence, shape.blocks[0], in_documents(batch, sequence))
        real = found_in(call.on("meta"))
        cost = cost_of(FAMILIES[family], replace(setting_of(batch, sequence, 2), packed=True), layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01


# --- LoRA ---------------------------------------------------------------------------------------


class FusedDropout(torch.nn.Module):
    """As CUDA does it, with a byte an element for the mask; the CPU's own keeps numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout(x, 0.1, True)[0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's own doing, for experts
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize(
    ("width", "adapter_width", "drops"),
    [
        (2, 4, False),
        (4, 4, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 2, 0), (2, 2, 1), (2, 4, 1), (4, 4, 0)]),
    ],
)
def test_lora_layers(family: str, targets: str, width: int, adapter_width: int, drops: bool) -> None:
    peft = pytest.importorskip("peft")
    chosen = None if targets == "all" else ("c_attn",) if family == "gpt2" else ("q_proj", "v_proj")
    config, shape = FAMILIES[family], shape_of(FAMILIES[family], 1)
    lora = peft.LoraConfig(
        r=4, target_modules="all-linear" if chosen is None else list(chosen), task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2", lora_dropout=0.1 if drops else 0.0,
    )  # fmt: skip
    if drops and chosen is None and family in ("mixtral", "qwen3_moe"):
        with pytest.raises(ValueError, match="does not work with lora_dropout"):  # nor do we: `check_levers` says it
            peft.get_peft_model(build(config, 1, width, "sdpa"), lora)
        return
    model = peft.get_peft_model(build(config, 1, width, "sdpa"), lora, autocast_adapter_dtype=adapter_width == 4)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleDict) and isinstance(module._modules.get("default"), torch.nn.Dropout):
            module["default"] = FusedDropout()
    for batch, sequence in SHAPES:
        call = call_of(model.base_model.model, batch, sequence, shape.blocks[0])
        real = found_in(call)
        setting = setting_of(
            batch,
            sequence,
            width,
            trains_base=False,
            lora_rank=4,
            lora_targets=chosen,
            adapter_width=adapter_width,
            lora_drops=drops,
        )
        cost = layer_cost(shape.blocks[0], shape.hidden_size, setting)
        adapters = sum(p.numel() for p in call.layer.parameters() if p.requires_grad)
        assert cost.weight_grads == adapters * adapter_width
        assert abs(relative(cost.saved, real.saved)) < 0.01
        assert abs(relative(cost.backward, real.backward)) < 0.05
        if not (targets == "all" and family in ("mixtral", "qwen3_moe")):  # adapters on experts are merged first
            assert abs(relative(cost.forward_unsaved, unsaved_peak(call))) < 0.05
        lowest = layer_cost(shape.blocks[0], shape.hidden_size, setting, input_grad=False)
        kept = saved_storages(lambda call=call: call(call.x), call.leave_out())
        assert abs(relative(lowest.saved, sum(kept.values()))) < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
@pytest.mark.parametrize(("width", "adapter_width"), [(2, 2), (2, 4)])
def test_frozen_layers_under_zero3_keep_their_inputs(
    family: str, width: int, adapter_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's own linear function saves what it was given, whatever trains."""
    peft = pytest.importorskip("peft")
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    targets = ("qkv_proj",) if family == "phi3" else ("q_proj", "v_proj")
    shape = shape_of(FAMILIES[family], 1)
    lora = peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM")
    model = peft.get_peft_model(
        build(FAMILIES[family], 1, width, "sdpa"), lora, autocast_adapter_dtype=adapter_width == 4
    )
    monkeypatch.setattr(torch.nn.functional, "linear", linear.LinearFunctionForZeroStage3.apply)
    for batch, sequence in SHAPES:
        real = found_in(call_of(model.base_model.model, batch, sequence, shape.blocks[0]))
        setting = setting_of(
            batch, sequence, width, trains_base=False, lora_rank=4, lora_targets=targets, adapter_width=adapter_width
        )
        cost = layer_cost(shape.blocks[0], shape.hidden_size, replace(setting, keeps_inputs=True))
        assert abs(relative(cost.saved, real.saved)) < 0.01
        assert abs(relative(cost.backward, real.backward)) < 0.05
        assert cost.saved > 1.05 * layer_cost(shape.blocks[0], shape.hidden_size, setting).saved


# --- CUDA's attention kernels, on the meta device -----------------------------------------------


def _repeated(module: Any, x: Any) -> Any:
    groups = getattr(module, "num_key_value_groups", 1)
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def flash(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> tuple[Any, None]:
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


def efficient(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    return _masked(torch.ops.aten._scaled_dot_product_efficient_attention, module, (q, k, v), mask, scaling)


def cudnn(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> tuple[Any, None]:
    return _masked(torch.ops.aten._scaled_dot_product_cudnn_attention, module, (q, k, v), mask, scaling)


def _masked(op: Any, module: Any, qkv: tuple[Any, Any, Any], mask: Any, scaling: float | None) -> tuple[Any, None]:
    q, k, v = qkv[0], _repeated(module, qkv[1]), _repeated(module, qkv[2])
    if mask is not None:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype).expand(-1, q.shape[1], -1, -1)
    out = op(q, k, v, mask, True, 0.0, mask is None, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def cuda_kernels() -> Iterator[None]:
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    kernels = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    ours = {"meta_fused": flash, "meta_efficient": efficient, "meta_cudnn": cudnn}
    for name, kernel in ours.items():
        kernels.register(name, kernel)
        masks.register(name, masks["sdpa"])
    yield
    for name in ours:
        del kernels._global_mapping[name]
        del masks._global_mapping[name]


MASKLESS = ["llama", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text", "olmo2", "stablelm", "gpt2", "gpt_neox"]


@pytest.mark.thorough
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("family", MASKLESS)
def test_flash_attention_on_the_meta_device(family: str) -> None:
    shape = shape_of(FAMILIES[family], 1)
    for batch, sequence in ((2, 32), (1, 64)):
        model = build(FAMILIES[family], 1, 2, "meta_fused")
        call = call_of(model, batch, sequence, shape.blocks[0])
        real = found_in(call.on("meta"))
        cost = cost_of(FAMILIES[family], setting_of(batch, sequence, 2), layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01


@pytest.mark.thorough
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("family", MASKLESS)
@pytest.mark.parametrize("width", DTYPES)
def test_memory_efficient_attention_on_the_meta_device(family: str, width: int) -> None:
    """Without grouped heads, this is what `sdpa` picks where flash attention cannot run."""
    config = {**FAMILIES[family], "num_key_value_heads": 4}
    shape = shape_of(config, 1)
    for batch, sequence in ((2, 32), (1, 64)):
        call = call_of(build(config, 1, width, "meta_efficient"), batch, sequence, shape.blocks[0])
        real = found_in(call.on("meta"))
        cost = cost_of(config, setting_of(batch, sequence, width, flash_capable=False), layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01


@pytest.mark.thorough
@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "starcoder2", "phi3"])
@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_window_shorter_than_the_sequence_brings_a_mask(family: str, kernel: str) -> None:
    config = {**FAMILIES[family], "sliding_window": 16}
    shape = shape_of(config, 1)
    for batch, sequence in ((2, 32), (1, 64)):
        call = call_of(build(config, 1, 2, f"meta_{kernel}"), batch, sequence, shape.blocks[0])
        real = found_in(call.on("meta"))
        setting = replace(setting_of(batch, sequence, 2), prefers_cudnn=kernel == "cudnn")
        cost = cost_of(config, setting, layer=0)
        assert abs(relative(cost.saved, real.saved)) < 0.01


# --- peaks --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if case[1] == "eager" and (case[0], "sdpa") in CASES else case
        for case in CASES
    ],
)
def test_the_worst_moments_of_a_layer(family: str, attention: str) -> None:
    config = FAMILIES[family]
    shape = shape_of(config, 1)
    block = shape.blocks[0]
    longest = 40 if family in SCANS else 160
    for width, batch, sequence in ((2, 2, 24), (2, 1, longest), (4, 3, 17)):
        call = call_of(family_model(family, 1, width, attention), batch, sequence, block)
        cost = layer_cost(block, shape.hidden_size, setting_of(batch, sequence, width, attention))
        real = found_in(call)
        where = (width, batch, sequence)
        assert abs(relative(cost.forward, real.forward)) < 0.05, where
        assert abs(relative(cost.forward_unsaved, unsaved_peak(call))) < 0.05, where
        if family not in ("mamba", "falcon_mamba"):
            assert abs(relative(cost.backward, real.backward)) < 0.05, where


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # PEFT's own doing, for experts
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt2", "mixtral", "mamba2"])
def test_the_worst_moment_where_weight_gradients_stay(family: str) -> None:
    config = FAMILIES[family]
    shape = shape_of(config, 1)
    for batch, sequence in ((1, 8), (2, 24)):
        call = call_of(family_model(family, 1, 2, "sdpa"), batch, sequence, shape.blocks[0])
        real = found_in(call, keep_grads=True)
        cost = layer_cost(shape.blocks[0], shape.hidden_size, setting_of(batch, sequence, 2))
        assert abs(relative(cost.backward_kept, real.backward)) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scan", ["torch", "official", "tightfit"])
def test_every_parameter_has_a_gradient(family: str, scan: str) -> None:
    shape = shape_of(FAMILIES[family], 2)
    for block in shape.blocks:
        cost = layer_cost(block, shape.hidden_size, replace(setting_of(2, 24, 2), scan=scan))
        parameters = 2 * sum(tensor.numel for tensor in block.tensors)
        assert cost.weight_grads == parameters
        assert sum(size for size, _ in cost.arrivals) == parameters
        assert cost.input_grad == layer_input_bytes(block, shape.hidden_size, setting_of(2, 24, 2))
        assert cost.backward <= cost.backward_kept
        assert cost.recompute <= cost.forward
        assert cost.forward_unsaved <= cost.forward


# --- the scan's kernels -------------------------------------------------------------------------

# mamba_inner_fn of mamba-ssm 2.3.2 on one H200, bf16: (batch, d_model, length), then GiB saved (output included),
# the forward's peak and the peak of both passes, above the inputs.
OFFICIAL = [
    ((1, 4864, 2048), 0.058, 0.151, 0.457),
    ((1, 4864, 8192), 0.233, 0.604, 1.526),
    ((8, 2560, 2048), 0.246, 0.637, 1.686),
]


def _mixer_cost(batch: int, hidden: int, length: int, scan: str) -> tuple[LayerCost, Mamba1]:
    """The mixer after its input projection, whose output counts as the input here."""
    config = {"model_type": "mamba", "vocab_size": 97, "hidden_size": hidden, "num_hidden_layers": 1}
    block = shape_from_config(config, "small").blocks[0]
    setting = Setting(micro_batch=batch, sequence=length, width=2, trains_base=True, scan=scan)
    ops = Operations(setting, {tensor.name: tensor for tensor in block.tensors})
    assert isinstance(block.mixer, Mamba1)
    out = mamba1(ops, Slot(ops.size(hidden), True), block.mixer, hidden)
    projection = ops.tape.ops.pop(0)
    return measure(ops.tape, projection.outputs[0], out), block.mixer


@pytest.mark.parametrize(("shape", "saved", "forward", "peak"), OFFICIAL)
def test_official_scan(shape: tuple[int, int, int], saved: float, forward: float, peak: float) -> None:
    batch, hidden, length = shape
    cost, mixer = _mixer_cost(batch, hidden, length, "official")
    # What was measured had its input with time contiguous and its A, D and dt bias in fp32 already; transformers'
    # mixer has neither, so the function copies them.
    copied = 2 * batch * length * 2 * mixer.inner + 4 * mixer.inner * (2 * mixer.state + 2)
    gib = 2**30
    assert (cost.saved + cost.output - copied) / gib == pytest.approx(saved, abs=0.0006)
    assert (cost.forward - copied) / gib == pytest.approx(forward, abs=0.0006)
    assert (cost.backward - copied) / gib == pytest.approx(peak, rel=0.005)


@pytest.mark.parametrize("shape", [shape for shape, *_ in OFFICIAL])
def test_our_scan_keeps_less_than_the_official_one(shape: tuple[int, int, int]) -> None:
    official, _ = _mixer_cost(*shape, "official")
    ours, _ = _mixer_cost(*shape, "tightfit")
    assert ours.saved < 0.9 * official.saved
    assert ours.backward < official.backward


# --- Mamba-2 before einsum -----------------------------------------------------------------------


def broadcast_chunk_scan(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None, **_: Any
) -> Any:
    """`mamba2_chunk_scan` as transformers had it before 5.18, less its caches: products first, sums afterwards."""
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    functional, heads = torch.nn.functional, x.shape[2]
    dt = torch.clamp(functional.softplus(dt + dt_bias.to(dt.dtype)), min=0.0, max=float("inf"))
    x = x.float()
    B, C = (each.float().repeat_interleave(heads // each.shape[2], dim=2, output_size=heads) for each in (B, C))
    pad = (chunk_size - x.shape[1] % chunk_size) % chunk_size
    length = x.shape[1]
    residual = D[..., None] * theirs.pad_tensor_by_size(x, pad)
    x = x * dt[..., None].float()
    A = A.to(x.dtype) * dt.float()
    x, A, B, C = (theirs.reshape_into_chunks(each, pad, chunk_size) for each in (x, A, B, C))
    A = A.permute(0, 3, 1, 2)
    sums = torch.cumsum(A, dim=-1)
    L = torch.exp(theirs.segment_sum(A))
    G = (C[:, :, :, None, :, :] * B[:, :, None, :, :, :]).sum(dim=-1)
    M = (G[..., None] * L.permute(0, 2, 3, 4, 1)[..., None]).sum(dim=-1)
    near = (M[..., None] * x[:, :, None]).sum(dim=3)
    decay = torch.exp(sums[:, :, :, -1:] - sums)
    weighted = B * decay.permute(0, -2, -1, 1)[..., None]
    states = (weighted[..., None, :] * x[..., None]).sum(dim=2)
    previous = torch.zeros_like(states[:, :1])
    states = torch.cat([previous, states], dim=1)
    passing = torch.exp(theirs.segment_sum(functional.pad(sums[:, :, :, -1], (1, 0)))).transpose(1, 3)
    passed = (passing[..., None, None] * states[:, :, None, ...]).sum(dim=1)
    states = passed[:, :-1]
    out_decay = torch.exp(sums)
    read = C[..., None, :] * states[:, :, None, ...]
    far = read.sum(-1) * out_decay.permute(0, 2, 3, 1)[..., None]
    out = near + far
    out = out.reshape(x.shape[0], -1, heads, x.shape[-1]) + residual
    return out[:, :length] if pad else out


@pytest.mark.thorough
@pytest.mark.parametrize("width", DTYPES)
def test_mamba2_before_einsum(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mamba2 import modeling_mamba2

    shape = shape_of(FAMILIES["mamba2"], 1)
    block = shape.blocks[0]
    model = build(FAMILIES["mamba2"], 1, width, "eager")
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", broadcast_chunk_scan)
    for batch, sequence in ((1, 40), (2, 24), (1, 20), (3, 17)):
        call = call_of(model, batch, sequence, block)
        real = found_in(call)
        cost = layer_cost(block, shape.hidden_size, setting_of(batch, sequence, width, broadcast_scan=True))
        where = (batch, sequence)
        assert abs(relative(cost.saved, real.saved)) < 0.01, where
        assert abs(relative(cost.forward, real.forward)) < 0.05, where
        assert abs(relative(cost.forward_unsaved, unsaved_peak(call))) < 0.05, where
        assert abs(relative(cost.backward, real.backward)) < 0.05, where


# --- layers that were traced --------------------------------------------------------------------


def test_a_traced_layer_is_taken_as_measured() -> None:
    traced = Traced(saved_bytes_per_token=1000, forward_bytes_per_token=1300, backward_bytes_per_token=1700)
    block = Block(mixer=traced, mlp=None, norm="rms", arrangement="single", tensors=(Tensor("whole.weight", (64, 64)),))
    cost = layer_cost(block, 64, setting_of(2, 24, 2))
    assert cost.saved == 48 * 1000
    assert cost.forward == 48 * 1300
    assert cost.backward == 48 * 1700
    assert cost.backward_kept == 48 * 1700 + 2 * 64 * 64
    assert cost.output == cost.input_grad == 48 * 64 * 2
    assert layer_cost(block, 64, setting_of(2, 24, 2, trains_base=False)).weight_grads == 0


# --- Liger's kernels ----------------------------------------------------------------------------

LIGERS = ("llama", "qwen3", "phi3", "gemma3_text", "olmo2")
MORE_LIGERS = ("mistral", "ministral", "qwen2", "phi3-whole-heads", "gemma", "gemma2", "granite", "olmo3", "smollm3")
MORE_LIGERS += ("smollm3-unrotated", "mixtral", "qwen3_moe")


class NoKernel:
    """Stands for a kernel that would write into tensors which are there already."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Liger as it runs on a GPU, but that nothing is computed: what its functions allocate and keep is their Python."""
    pytest.importorskip("liger_kernel")
    from importlib import import_module

    from triton.runtime.jit import KernelInterface

    from tightfit.train.kernels import bind_liger

    for name in ("rms_norm", "rope", "swiglu", "geglu"):
        module = import_module(f"liger_kernel.ops.{name}")
        for leaf, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                monkeypatch.setattr(module, leaf, NoKernel())
    rope = import_module("liger_kernel.ops.rope").LigerRopeFunction
    monkeypatch.setattr(import_module("liger_kernel.transformers.monkey_patch"), "liger_rotary_pos_emb", rope.apply)
    turned: dict[Any, Any] = {}

    def bind(model: Any) -> None:
        own = import_module(type(model).__module__)
        turned.setdefault(own, own.apply_rotary_pos_emb)
        assert bind_liger(model) is None

    yield bind
    for own, function in turned.items():
        own.apply_rotary_pos_emb = function


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*LIGERS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_LIGERS)])
@pytest.mark.parametrize("width", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_with_ligers_kernels(family: str, width: int, liger: Callable[[Any], None]) -> None:
    shape = shape_of(FAMILIES[family], 1)
    for attention in attentions_of(family):
        model = build(FAMILIES[family], 1, width, attention)
        liger(model)
        for batch, sequence in SHAPES:
            call = call_of(model, batch, sequence, shape.blocks[0])
            real = found_in(call)
            setting = setting_of(batch, sequence, width, attention, liger=True)
            cost = layer_cost(shape.blocks[0], shape.hidden_size, setting)
            at = (attention, batch, sequence)
            assert abs(relative(cost.saved, real.saved)) < 0.001, at
            assert abs(relative(cost.forward, real.forward)) < 0.01, at
            assert abs(relative(cost.backward, real.backward)) < 0.01, at
            assert abs(relative(cost.forward_unsaved, unsaved_peak(call))) < 0.03, at


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapters_around_ligers_kernels(family: str, liger: Callable[[Any], None]) -> None:
    """Two products read what the gate puts out, the projection's and its adapter's: their gradients are added up beside
    both."""
    peft = pytest.importorskip("peft")
    model, shape = build(FAMILIES[family], 1, 2, "sdpa"), shape_of(FAMILIES[family], 1)
    liger(model)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for batch, sequence in SHAPES:
        real = found_in(call_of(adapted.base_model.model, batch, sequence, shape.blocks[0]))
        setting = setting_of(batch, sequence, 2, trains_base=False, lora_rank=4, liger=True)
        cost = layer_cost(shape.blocks[0], shape.hidden_size, setting)
        assert cost.saved == real.saved
        assert cost.forward == real.forward
        assert abs(relative(cost.backward, real.backward)) < 0.01
