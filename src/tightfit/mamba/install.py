"""Our scan, convolution and mixer inside transformers' Mamba and FalconMamba: one call, and one to take them out again.

The fused mixer reads its submodules' weights and never calls them. So it is taken only where nobody would notice: no
cache, and every submodule that it passes over is PyTorch's own, without hooks. An adapter in one of them, a hook, or a
quantized matrix sends that layer through `_call_submodules`, which keeps our scan and convolution.
ZeRO-3 hangs hooks on every module, unless it is told that a mixer is a leaf and gathers it whole: `whole_mixers` says
of which classes that may be done.

With a cache transformers' own forward runs: it reads a prompt through our scan, and decodes by itself. Before
transformers 5 its forward has the scan written into it, so there only calls without a cache are ours.

transformers' attention models keep packed documents apart by `position_ids` that begin anew at each; its Mamba takes
them and looks at none. With our path installed they mean the same to both: neither the convolution nor the scan looks
beyond a position of zero. A model hands `attention_mask` on to its layers, and these to their mixers, untouched in
every version from 4.56 on, and a layer that is computed a second time for the backward pass gets what it got the first
time. So the starts travel in its place, with the mask beside them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightfit.mamba.arguments import ScanError
from tightfit.mamba.conv import causal_conv1d
from tightfit.mamba.mixer import Weights, mamba_mixer, normalise
from tightfit.mamba.scan import selective_scan
from tightfit.messages import text

MIXERS = {
    "transformers.models.mamba.modeling_mamba": "MambaMixer",
    "transformers.models.falcon_mamba.modeling_falcon_mamba": "FalconMambaMixer",
}
PASSED_OVER = ("conv1d", "x_proj", "dt_proj", "out_proj", "b_layernorm", "c_layernorm", "dt_layernorm")
"""Submodules that the fused mixer does not call; the norms are FalconMamba's, from transformers 5."""
SILU = ("silu", "swish")

_replaced: list[tuple[Any, str, Any]] = []  # (where, name, what was there), while installed


@dataclass(frozen=True, slots=True)
class Documents:
    """What layers and mixers get as their `attention_mask`."""

    starts: Tensor  # (batch, length), true where a document starts
    mask: Tensor | None


def install() -> None:
    """Into every Mamba and FalconMamba, those that stand already included. Once is enough; twice does no harm."""
    if _replaced:
        return
    for name, mixer in MIXERS.items():
        module = importlib.import_module(name)
        # The name of transformers 5; before, the scan was not a function that could be replaced.
        separable = hasattr(module, "mamba_selective_scan")
        if separable:
            # Whoever gets that far must not be fused, and None says so.
            _replace(module, "mamba_inner_fn", lambda *_, **__: None)
            _replace(module, "mamba_selective_scan", _scan)
            _replace(module, "causal_conv1d_fn", _conv_before(module.causal_conv1d_fn))
        owner = getattr(module, mixer)
        _replace(owner, "forward", _forward_before(owner.forward, masks_both=separable))
        for model in (getattr(module, mixer.removesuffix("Mixer") + kind) for kind in ("Model", "ForCausalLM")):
            _replace(model, "forward", reading_positions(model.forward))


def uninstall() -> None:
    """Puts back what was there."""
    while _replaced:
        where, name, before = _replaced.pop()
        setattr(where, name, before)


def installed() -> bool:
    return bool(_replaced)


def fuses(mixer: nn.Module) -> bool:
    """Whether the fused call does what calling this mixer's submodules would."""
    # A hook on all modules of the process would miss the submodules too.
    has_global_hook = bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]
    if has_global_hook or getattr(mixer, "activation", None) not in SILU:
        return False
    # No assignment inside the generator: up to torch 2.11 its compiler cannot follow that.
    children = [getattr(mixer, name, None) for name in PASSED_OVER]
    return all(child is None or _plain(child) for child in children)


def whole_mixers(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of this model's mixers, where each of them fuses and its first projection is plain too: an engine may
    gather such a mixer as one piece."""
    names = set(MIXERS.values())
    found = [module for module in model.modules() if type(module).__name__ in names]
    every = all(fuses(mixer) and _plain(mixer.get_submodule("in_proj")) for mixer in found)
    return sorted({type(mixer) for mixer in found}, key=lambda each: each.__name__) if every else []


def _replace(where: ModuleType | type, name: str, by: Callable[..., Any]) -> None:
    _replaced.append((where, name, getattr(where, name)))
    setattr(where, name, by)


def _plain(module: nn.Module) -> bool:
    """PyTorch's own (or FalconMamba's norm), and nothing hangs on it."""
    ours = type(module) in (nn.Linear, nn.Conv1d) or type(module).__name__ == "FalconMambaWeightlessRMSNorm"
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return ours and not any(hooks) and "forward" not in vars(module)  # accelerate puts a forward on the instance


def _scan(  # noqa: PLR0913 - transformers' signature
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, starts: Tensor | None = None, **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    # Autocast would put the sums over the states into bf16.
    with torch.autocast(hidden_states.device.type, enabled=False):
        return selective_scan(
            hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, starts=starts
        )


def _conv_before(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def conv(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any
    ) -> Tensor:
        if any(each is not None for each in more.values()) or activation not in (None, *SILU):
            return original(hidden_states, weight, bias, activation=activation, **more)
        return causal_conv1d(hidden_states, weight, bias, silu=activation is not None)

    return conv


def reading_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward pass of a whole model, of which a document starts at each position of zero."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, position_ids: Tensor | None = None, **more: Any) -> Any:
        if position_ids is None:
            return original(self, *args, **more)
        bound = signature.bind(self, *args, **more)
        given = bound.arguments
        ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
        tokens = embedded if ids is None else ids
        shape = position_ids.shape if tokens is None else tokens.shape[:2]
        if position_ids.dim() != 2 or position_ids.shape[1:] != shape[1:] or position_ids.shape[0] not in (1, shape[0]):
            raise ScanError(text("scan.positions-shape", wanted=list(shape), shape=list(position_ids.shape)))
        starts = (position_ids == 0).expand(shape)
        given["attention_mask"] = Documents(starts, given.get("attention_mask"))
        return original(*bound.args, **bound.kwargs)

    return forward


def _forward_before(original: Callable[..., Any], *, masks_both: bool) -> Callable[..., Any]:
    """`masks_both`: transformers 5 masks what goes into the first projection, earlier ones half of what comes out."""

    @functools.wraps(original)
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        cache_params: Any = None,
        *args: Any,
        attention_mask: Tensor | Documents | None = None,
        starts: Tensor | None = None,
        **more: Any,
    ) -> Any:
        if isinstance(attention_mask, Documents):
            # With a cache, positions that only count on say nothing.
            if cache_params is None or bool(attention_mask.starts[:, 1:].any()):
                starts = attention_mask.starts
            attention_mask = attention_mask.mask
        if not masks_both and attention_mask is not None and cache_params is None and bool(attention_mask.all()):
            attention_mask = None
        known = not args and all(each is None or name == "cache_position" for name, each in more.items())
        maskable = masks_both or attention_mask is None
        # With accelerate's hooks a weight is there only while its own module, or transformers' forward, runs.
        offloaded = any(hasattr(child, "_hf_hook") for child in self.children())
        if cache_params is None and known and maskable and not offloaded:
            return _without_cache(self, hidden_states, attention_mask, starts)
        if starts is not None and cache_params is not None:
            raise ScanError(text("scan.starts-with-cache"))
        if starts is not None:
            raise ScanError(text("scan.starts-with-mask"))
        # As it was called: what is None has the same default in every version.
        if attention_mask is not None:
            more["attention_mask"] = attention_mask
        return original(self, hidden_states, cache_params, *args, **more)

    return forward


def _without_cache(mixer: Any, hidden_states: Tensor, mask: Tensor | None, starts: Tensor | None) -> Tensor:
    if mask is not None:
        hidden_states = (hidden_states * mask[:, :, None]).to(hidden_states.dtype)
    xz = mixer.in_proj(hidden_states).transpose(1, 2)
    if not fuses(mixer):
        return _call_submodules(mixer, xz, mask, starts)
    weights = Weights(
        conv=mixer.conv1d.weight, conv_bias=mixer.conv1d.bias, x_proj=mixer.x_proj.weight,
        dt_proj=mixer.dt_proj.weight, dt_bias=mixer.dt_proj.bias, A_log=mixer.A_log, D=mixer.D,
        out_proj=mixer.out_proj.weight, out_bias=mixer.out_proj.bias,
    )  # fmt: skip
    return mamba_mixer(xz, weights, norm_eps=getattr(mixer, "rms_eps", None), keep=mask, starts=starts)


def _call_submodules(mixer: Any, xz: Tensor, mask: Tensor | None, starts: Tensor | None) -> Tensor:
    """The same by calling every submodule, so that adapters and hooks have their say."""
    x, gate = xz.chunk(2, dim=1)
    if _plain(mixer.conv1d):
        silu = mixer.activation in SILU
        u = causal_conv1d(x, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, silu=silu, starts=starts)
    elif starts is not None:
        raise ScanError(text("scan.starts-with-hooks"))
    else:
        u, silu = mixer.conv1d(x)[..., : x.shape[2]], False
    u = u if silu else mixer.act(u)
    if mask is not None:
        u = u * mask[:, None].to(u.dtype)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, C = mixer.x_proj(u.transpose(1, 2)).split(sizes, dim=-1)
    if hasattr(mixer, "b_layernorm"):
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    elif hasattr(mixer, "rms_eps"):
        dt, B, C = (normalise(part, mixer.rms_eps) for part in (dt, B, C))
    bias = None
    if _plain(mixer.dt_proj):  # the bias in fp32: in bf16 it would round the time step
        delta = F.linear(dt, mixer.dt_proj.weight)
        bias = None if mixer.dt_proj.bias is None else mixer.dt_proj.bias.float()
    else:
        delta = mixer.dt_proj(dt)
    A = -torch.exp(mixer.A_log.float())
    out = _scan(
        u, delta.transpose(1, 2), A, B.transpose(1, 2), C.transpose(1, 2), mixer.D.float(), gate, bias, True,
        starts=starts,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    result: Tensor = mixer.out_proj(out.transpose(1, 2))
    return result
