"""Liger's kernels in the layers of a model that exists: norms, rotary embedding and gated activations.

What they replace are chains of small kernels that read and write whole activations for an addition or a root. Liger
has a function for every kind of model that it knows, which binds other forwards to the modules of an instance. It is
asked for these three and never for its loss, which is a lever of its own; nor for its experts, which are another
product altogether and nothing that is priced.

Three things need care:
- Liger also puts its classes into the module of transformers that the model comes from, so that models built later
  would have them too. These are put back. The rotary embedding is a function of that module and stays replaced.
- Binding a forward does not look at the activation that the model's config names, as Liger's constructors do: a gate
  of another kind would be computed as silu without a word. So that is looked at here.
- Its rotary embedding overwrites the projections that it turns, unseen by autograd. Where these are kept for a
  recomputation, it would turn them twice: layers of which only parts recompute stay plain.

Compiled layers need none of this: the compiler fuses the same chains, and Liger's kernels would break its graphs.
"""

from __future__ import annotations

import importlib.util
import inspect
from copy import copy
from importlib import import_module
from typing import Any

from tightfit.inputs.versions import find_installed, release
from tightfit.messages import Message
from tightfit.types import Levers

OLDEST_LIGER = "0.8.5"  # the one that was read; older ones rotate whole heads of models that rotate a part of each
GATES = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""The switches of Liger's gated activations, and which functions of a config these compute."""
WHOLE = ("rope", "rms_norm")


def install_kernels(model: Any, levers: Levers, *, on_gpu: bool) -> Message | None:
    """Bind Liger's kernels to a model without adapters, as the levers say; what to say where it stays plain."""
    if levers.kernels != "fused" or levers.compile != "off":
        return None
    why = _find_obstacle(levers, on_gpu) or bind_liger(model)
    return None if why is None else Message("train.uses-plain-kernels", why=why)


def _find_obstacle(levers: Levers, on_gpu: bool) -> Message | None:
    if levers.checkpointing.select:
        return Message("train.liger-and-select")
    if not on_gpu:
        return Message("train.liger-needs-gpu")
    if importlib.util.find_spec("liger_kernel") is None:
        return Message("train.no-liger")
    found = find_installed("liger-kernel")
    if found is not None and release(found) < release(OLDEST_LIGER):
        return Message("train.old-liger", found=found, oldest=OLDEST_LIGER)
    return None


def bind_liger(model: Any) -> Message | None:
    """Bind the kernels, or leave everything as it was and say why."""
    kind = model.config.model_type
    own = import_module(type(model).__module__)
    names = dict(vars(own))
    inside = {  # what modules hold, with their parameters and children by name
        module: {name: copy(held) if isinstance(held, dict) else held for name, held in vars(module).items()}
        for module in model.modules()
    }
    try:
        known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
        if kind not in known:
            return Message("train.liger-knows-no", model_type=kind)
        switches = inspect.signature(known[kind]).parameters.keys() - {"model"}
        known[kind](model=model, **{switch: _switches_on(switch, model) for switch in switches})
    except Exception as error:
        # Of any kind: Liger and transformers move on separately, and Triton may be missing or too old for either.
        for holder, before in (*inside.items(), (own, names)):
            for name in vars(holder).keys() - before.keys():
                del vars(holder)[name]
            vars(holder).update(before)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Message("train.liger-failed", model_type=kind, error=why)
    vars(own).update({name: value for name, value in names.items() if isinstance(value, type)})
    return None


def _switches_on(switch: str, model: Any) -> bool:
    """Whether to switch on what one of Liger's functions calls by this name."""
    if switch not in GATES:
        return switch in WHOLE
    config = model.config
    named = {getattr(config, field, None) for field in ("hidden_act", "hidden_activation")} - {None}
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    return not has_experts and named <= set(GATES[switch])
