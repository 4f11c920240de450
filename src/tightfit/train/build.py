"""A Hugging Face model without its weights, ready for an engine to shard.

Every engine starts from the same skeleton: parameters on the meta device, buffers computed for real on the host.
Building everything on the meta device would lose what no checkpoint holds, rotary frequencies above all, and the
loss would hardly show it. Hugging Face's own initialisation never runs: under ZeRO-3 it is skipped or raises, and
elsewhere it would draw other numbers on each engine. `assemble.py` gives the shards their values.

ZeRO-3 has to build under its own context, so that each module is partitioned as it is made; it takes its buffers
from a skeleton too.

A model of one precision with a few parameters or buffers of another fails in the middle of a forward pass ("expected
Half but found Float"), or silently computes in the wrong one. On a skeleton every parameter can be given its dtype
before any value is there, so parameters are always repaired (`audit`); a buffer of 64 bits becomes one of 32, and the
rest of the buffers are left as the model's authors made them.

LoRA adapters are made on the meta device like everything else and get their values from `assemble.py`: PEFT would draw
them from the state of the global generator, which differs from engine to engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.messages import Message
from tightfit.train.config import AdapterSettings, ModelSource
from tightfit.types import AttentionKernel, ConfigError, Levers, Lora, ModelError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ATTENTION: dict[AttentionKernel, str] = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}


def rests_in(levers: Levers, *, trains: bool) -> torch.dtype:
    """FSDP2 keeps what trains in fp32; everything else but adapters rests in the working precision."""
    masters = levers.is_fsdp2 and levers.master_weights and trains
    return torch.float32 if masters else DTYPES[levers.precision]


def hf_config(source: ModelSource, folder: Path | None) -> Any:
    """The config of the language model; `folder` is where the weights lie."""
    from transformers import AutoConfig

    if source.config is None:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=source.trust_remote_code)
    else:
        fields = {key: _decode(value) for key, value in source.config.items()}
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    text = config.get_text_config()  # of a model that also sees: only what reads and writes is trained
    text.use_cache = False
    return text


def _decode(value: Any) -> Any:
    """JSON has no infinity: transformers writes `{"__float__": "Infinity"}`, as in Mamba-2's time_step_limit."""
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode(inside) for key, inside in value.items()}
    return value


_CAPPED = ("gemma2", "vaultgemma")
"""Kinds of model whose attention scores have a cap, which sdpa has not: transformers drops it silently, or refuses."""


def attention_of(levers: Levers, on_gpu: bool, config: Any = None) -> tuple[AttentionKernel, Message | None]:
    """The kernel to use, and what to say where it is not the one that was asked for."""
    why = None
    if levers.attention == "flash":
        if on_gpu and importlib.util.find_spec("flash_attn") is not None:
            return "flash", None
        why = Message("train.no-flash-attn") if on_gpu else Message("train.flash-needs-gpu")
    is_capped = getattr(config, "model_type", None) in _CAPPED and config.attn_logit_softcapping is not None
    if levers.attention != "eager" and is_capped:
        uncapped = Message("train.sdpa-no-cap", model_type=config.model_type)
        return "eager", Message("train.uses-eager", why=why or uncapped)
    return ("sdpa", Message("train.uses-sdpa", why=why)) if why else (levers.attention, None)


def skeleton(config: Any, dtype: torch.dtype, attention: AttentionKernel, *, trust_remote_code: bool = False) -> Any:
    """The model with its parameters on the meta device and its buffers as a plain build has them."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = _make_model(config, dtype, attention, trust_remote_code)
    model.tie_weights()  # the context gives each name a parameter of its own
    return model


def _make_model(config: Any, dtype: torch.dtype, attention: AttentionKernel, trust_remote_code: bool) -> Any:
    maker: Any = import_module("transformers").AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": dtype}
    if "mamba" not in config.model_type:
        options["attn_implementation"] = _ATTENTION[attention]
    try:
        place = import_module("transformers.initialization")
    except ImportError:  # before transformers 5
        place = import_module("transformers.modeling_utils")
    with place.no_init_weights():
        try:
            model = maker.from_config(config, trust_remote_code=trust_remote_code, **options)
        except ValueError as error:
            why = str(error).strip().partition("\n")[0]
            raise ModelError(Message("train.no-causal-model", model_type=config.model_type, error=why)) from error
        model.tie_weights()
    model.train()
    return model


def partition(
    whole: Any, attention: AttentionKernel, deepspeed: Mapping[str, Any], *, trust_remote_code: bool = False
) -> Any:
    """The model of a skeleton as ZeRO-3 wants it: each module's parameters are partitioned as soon as they exist. The
    precision is the one that the file names: `zero.Init(dtype=…)` is overruled where the device has no fp16."""
    from deepspeed.runtime.zero.partition_parameters import Init, is_zero_param

    class OneDtype(Init):  # type: ignore[misc, unused-ignore]
        """Casts what a module makes in another dtype, before it is cut: the skeleton's audit has named it."""

        def _post_init_method(self, module: nn.Module) -> None:
            for param in module.parameters(recurse=False):
                if param.is_floating_point() and not is_zero_param(param):
                    param.data = param.data.to(self.dtype)
            super()._post_init_method(module)

    with OneDtype(config_dict_or_path=dict(deepspeed)):
        model = _make_model(whole.config, whole.dtype, attention, trust_remote_code)
    # The skeleton's buffers, on the device where its own are: the context may have rounded them.
    for name, buffer in whole.named_buffers():
        parent, _, leaf = name.rpartition(".")
        held = model.get_submodule(parent)._buffers
        held[leaf] = buffer.to(held[leaf].device)
    return model


def body_of(model: Any) -> Any:
    """The Hugging Face model inside adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder's layers, bottom to top."""
    return list(find_layers(model))


def number_layers(model: Any) -> list[tuple[int, nn.Module]]:
    """The same, each with its number from the bottom of the model, or of its stage of a pipeline."""
    found: Any = find_layers(model)
    return list(zip(found.depths if hasattr(found, DEPTHS) else range(len(found)), found, strict=True))


DEPTHS = "depths"  # what the list of a model has of which a pipeline took some layers


def find_layers(model: Any) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ModelError(Message("train.no-layers", model=type(model).__name__))
    return max(lists, key=lambda each: (hasattr(each, DEPTHS), len(each)))


def replace_meta(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put another tensor in the place of each parameter on the meta device; a tied pair stays one parameter."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for leaf, param in list(module._parameters.items()):
            if param is None or param.device.type != "meta":
                continue
            if param not in made:
                new = make(f"{prefix}.{leaf}" if prefix else leaf, param)
                if not isinstance(new, nn.Parameter):  # else it is the same
                    new = nn.Parameter(new, requires_grad=param.requires_grad)
                made[param] = new
            module._parameters[leaf] = made[param]


def cast_meta(model: nn.Module, wanted: Callable[[str, nn.Parameter], torch.dtype]) -> None:
    """Give parameters on the meta device other dtypes."""
    replace_meta(model, lambda name, param: param.to(wanted(name, param)))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the library's advice to programmers."""
    talk: Any = import_module("transformers.utils.logging")
    before = talk.get_verbosity()
    talk.set_verbosity_error()
    try:
        yield
    finally:
        talk.set_verbosity(before)


def freeze(model: Any, levers: Levers) -> None:
    """The lowest layers and the embedding do not train, or nothing but the embedding, or all but it; with adapters
    nothing else."""
    layers = layers_of(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    # Of tokens, and of positions where these are learnt (gpt2): all that stands below the layers.
    below = [each for each in model.modules() if isinstance(each, nn.Embedding) and id(each) not in inside]
    if levers.method != "full" or levers.trains == "embeddings":
        model.requires_grad_(False)
    if levers.trains == "embeddings":
        for module in below:
            module.requires_grad_(True)
    elif levers.method == "full" and not levers.trains_embedding:
        for frozen in (*below, *layers[: levers.frozen_layers]):
            frozen.requires_grad_(False)


def audit(model: nn.Module, dtype: torch.dtype) -> tuple[Message, ...]:
    """Give each floating-point parameter the dtype that it should have; what was not so before."""
    changed: list[tuple[str, torch.dtype, torch.dtype]] = []

    def right(name: str, param: nn.Parameter) -> torch.dtype:
        now = dtype if param.dtype.is_floating_point else param.dtype
        changed.append((name, param.dtype, now))
        return now

    cast_meta(model, right)
    for prefix, module in model.named_modules():
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.dtype == torch.float64:
                module._buffers[leaf] = buffer.float()
                changed.append((f"{prefix}.{leaf}".lstrip("."), torch.float64, torch.float32))
    return tuple(
        Message("train.was-and-is", name=name, old=str(old).removeprefix("torch."), new=str(new).removeprefix("torch."))
        for name, old, new in changed
        if old != new
    )


_SCANS = {
    "mamba": "transformers.models.mamba.modeling_mamba",
    "falcon_mamba": "transformers.models.falcon_mamba.modeling_falcon_mamba",
}


def install_scan(model_type: str, levers: Levers) -> Message | None:
    """Which selective scan Mamba runs on, put into its module; what to say where it is another than was planned.

    Ours is put into Hugging Face's modules by `tightfit.mamba.install`. Hugging Face itself binds the official kernels
    when they are installed. Its own fallback adds the bias of the time step in the working precision; here it is added
    in fp32, as the kernels and our path do: A, D and that bias decide how long a state lives.
    """
    if model_type not in _SCANS:
        return None
    if levers.scan == "tightfit":
        from tightfit.mamba.install import install

        install()
        return None
    official = levers.scan == "official"
    if official and importlib.util.find_spec("mamba_ssm") is not None:
        return None
    module: Any = import_module(_SCANS[model_type])
    scan = getattr(module, "mamba_selective_scan", None)
    if scan is not None and not getattr(scan, "wide", False):

        def wide(hidden_states: torch.Tensor, dt: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return scan(hidden_states, dt.float(), *args, **kwargs)

        wide.wide = True  # type: ignore[attr-defined]
        module.mamba_selective_scan = wide
    return Message("train.no-mamba-ssm") if official else None


ReadWhole = Callable[[str, tuple[int, ...]], Tensor]  # a tensor's name and shape → its values, on the host
REFUSED = {name: {"out_proj", "conv1d"} for name in ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")}
"""Modules by kind of model that PEFT does not adapt: their kernels read the weights and never call them."""


def add_adapters(model: Any, lora: Lora, settings: AdapterSettings, dtype: torch.dtype) -> Any:
    """The model with adapters around the targets; nothing else trains."""
    from peft import LoraConfig, get_peft_model

    # What the user named, or every linear layer that PEFT can adapt.
    targets: str | list[str] = "all-linear" if lora.targets is None else list(lora.targets)
    if lora.targets is None and (refused := REFUSED.get(model.config.model_type)):
        head = model.get_output_embeddings()
        linear = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
        targets = sorted({name.rpartition(".")[2] for name in linear} - refused)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(Message("train.peft-targets", why=str(error).partition(chr(10))[0])) from error
    cast_meta(adapted, lambda _, param: dtype if param.requires_grad else param.dtype)
    return adapted


def adapter_dtype(levers: Levers) -> torch.dtype:
    """In which precision adapters rest. DeepSpeed keeps fp32 copies of its own, and casts what was not built under
    ZeRO-3's context, as 4-bit models are not; FSDP2's shards are the only ones."""
    assert levers.lora is not None
    if levers.precision == "fp32":
        return torch.float32
    if levers.is_fsdp2:
        return torch.float32 if levers.master_weights else DTYPES[levers.precision]
    if levers.lora.dtype == "fp32" and levers.stage == 3 and levers.method != "qlora":
        return torch.float32
    return DTYPES[levers.precision]


def quantise(
    model: Any,
    read: ReadWhole,
    device: torch.device,
    compute: torch.dtype,
    keep: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Replace every linear layer but the head by an NF4 one, a matrix at a time. `device`: the one that packs them.
    `keep`: what is kept of a packed matrix instead, by the layer that it was."""
    try:
        layers: Any = import_module("bitsandbytes.nn")
    except ImportError:
        raise ConfigError(Message("train.qlora-needs-bitsandbytes")) from None
    body = body_of(model)
    head = body.get_output_embeddings()
    for parent_name, parent in list(body.named_modules()):
        for leaf, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or child is head:
                continue
            name = f"{parent_name}.{leaf}"
            packed = layers.Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=compute,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            whole = read(f"{name}.weight", tuple(child.weight.shape)).to(compute)
            packed.weight = layers.Params4bit(whole, requires_grad=False, quant_type="nf4").to(device)
            if keep is not None:
                packed.weight.data = keep(child, packed.weight.data)
            del whole  # before the next one is read
            packed.quant_state = packed.weight.quant_state  # FSDP2 replaces the parameter, which loses it
            if child.bias is not None:
                bias = read(f"{name}.bias", tuple(child.bias.shape)).to(device, compute)
                bias = bias if keep is None else keep(child, bias)
                packed.bias = nn.Parameter(bias, requires_grad=False)
            packed.register_forward_hook(_let_go_of_weight)
            setattr(parent, leaf, packed)
    body.is_loaded_in_4bit = True
    body.config.quantization_config = None


class _WeightThen:
    """What a node of autograd keeps of a packed matrix, looked up when it is read."""

    def __init__(self, weight: nn.Parameter, kept: Tensor) -> None:
        self._weight, self._view = weight, (kept.shape, kept.stride())

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((None, self._weight.data.as_strided(*self._view)))


def _let_go_of_weight(layer: nn.Module, _: Any, output: Tensor) -> None:
    """`MatMul4Bit` keeps the packed matrix outside `save_for_backward`, under recomputation too: what ZeRO-3 gathered
    and released would stay until the backward pass, all layers of it. For that pass it is gathered again. Compiled
    code has no such node, nor ZeRO-3 around it."""
    if torch.compiler.is_compiling():
        return
    node: Any = output.grad_fn
    if node is not None and not hasattr(node, "tensors"):
        node = node.next_functions[0][0]  # behind the cast of its output
    weight: Any = layer.weight
    if hasattr(weight, "ds_id") and getattr(node, "tensors", (None, None))[1] is not None:
        node.tensors = _WeightThen(weight, node.tensors[1])
