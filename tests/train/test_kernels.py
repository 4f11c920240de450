"""Liger's kernels, bound to a model that has no weights yet, or one sentence why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightfit.messages import Message
from tightfit.types import Checkpointing, Levers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tightfit.train import kernels  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
FUSED = Levers(kernels="fused")
IN_PARTS = Levers(kernels="fused", checkpointing=Checkpointing(select=("mlp",)))


def make_model(kind: str, **others: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **others}))


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Liger that knows llama and gemma, replaces what the real one does and remembers what it was asked for."""
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama

    asked: dict[str, Any] = {}

    class OtherNorm(torch.nn.Module):  # type: ignore[misc]
        pass

    def apply_llama(
        rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True, swiglu: bool = True, model: Any = None,
    ) -> None:  # fmt: skip
        asked.update(rope=rope, losses=cross_entropy or fused_linear_cross_entropy, rms_norm=rms_norm, swiglu=swiglu)
        modeling_llama.LlamaRMSNorm = OtherNorm
        modeling_llama.apply_rotary_pos_emb = len
        model.model.norm.__dict__["forward"] = len
        if "breaks" in asked:
            model.model.norm.variance_epsilon = None
            model.model.other, modeling_llama.OtherNorm = OtherNorm(), OtherNorm
            raise asked["breaks"]

    def apply_gemma(geglu: bool = True, model: Any = None) -> None:
        asked.update(geglu=geglu)

    patch = ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_llama, "gemma": apply_gemma}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    for module in (modeling_llama, modeling_gemma):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    return asked


def test_norms_rotary_embedding_and_gates_but_never_a_loss(liger: dict[str, Any]) -> None:
    from transformers.models.llama import modeling_llama

    norm, model = modeling_llama.LlamaRMSNorm, make_model("llama")
    assert kernels.bind_liger(model) is None
    assert liger == {"rope": True, "losses": False, "rms_norm": True, "swiglu": True}
    assert modeling_llama.apply_rotary_pos_emb is len
    assert modeling_llama.LlamaRMSNorm is norm  # so that models which are built later are as ever


def test_a_gate_of_another_kind_is_left_alone(liger: dict[str, Any]) -> None:
    kernels.bind_liger(make_model("llama", hidden_act="gelu"))
    assert liger == {"rope": True, "losses": False, "rms_norm": True, "swiglu": False}
    for activation, switched in (("gelu_pytorch_tanh", True), ("gelu", False)):
        kernels.bind_liger(make_model("gemma", hidden_act=activation, hidden_activation=activation, head_dim=8))
        assert liger["geglu"] is switched


@pytest.mark.parametrize("kind", [AttributeError, ValueError, OSError, AssertionError, KeyError])
def test_a_liger_that_does_not_fit_leaves_the_model_as_it_was(liger: dict[str, Any], kind: type[Exception]) -> None:
    from transformers.models.llama import modeling_llama

    before, model = dict(vars(modeling_llama)), make_model("llama")
    held, inside = dict(vars(model.model.norm)), list(model.modules())
    liger["breaks"] = kind("no such class\nin this release")
    said = kernels.bind_liger(model)
    assert said is not None
    assert said.id == "train.liger-failed"
    assert str(said.fields["error"]).startswith(f"{kind.__name__}: ")
    assert "no such class" in str(said)
    assert vars(modeling_llama) == before
    assert vars(model.model.norm) == held
    assert list(model.modules()) == inside


def test_a_model_that_liger_does_not_know(liger: dict[str, Any]) -> None:
    assert kernels.bind_liger(make_model("starcoder2")) == Message("train.liger-knows-no", model_type="starcoder2")


@pytest.mark.parametrize(
    ("levers", "on_gpu", "why"),
    [
        (Levers(), True, None),
        (Levers(kernels="fused", compile="layers"), True, None),
        (IN_PARTS, True, Message("train.liger-and-select")),
        (FUSED, False, Message("train.liger-needs-gpu")),
        (FUSED, True, Message("train.no-liger")),
    ],
)
def test_why_layers_stay_plain(
    levers: Levers, on_gpu: bool, why: Message | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    said = kernels.install_kernels(None, levers, on_gpu=on_gpu)
    assert said == (None if why is None else Message("train.uses-plain-kernels", why=why))


def test_an_old_liger_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "find_installed", lambda name: "0.5.10")
    why = Message("train.old-liger", found="0.5.10", oldest=kernels.OLDEST_LIGER)
    assert kernels.install_kernels(None, FUSED, on_gpu=True) == Message("train.uses-plain-kernels", why=why)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in "phi3 gemma2 gemma3_text olmo2 qwen3".split())],
)
def test_losses_with_ligers_kernels_are_the_plain_ones(family: str) -> None:
    """Through Triton's interpreter, in fp32: three steps apart by a few roundings of the loss."""
    pytest.importorskip("liger_kernel")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("liger_losses.py")), family],
        check=False, capture_output=True, text=True, timeout=600, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
    for plain, fused in zip(found["plain"], found["fused"], strict=True):
        assert fused == pytest.approx(plain, abs=1e-5)
        assert plain[-1] < plain[0]


# --- on a GPU: each kernel against float64 ------------------------------------------------------


def rms(offset: float) -> Callable[..., Any]:
    return lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (offset + w)


def turn(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    def half(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([-high, low], -1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("piece", ["norm", "gemma norm", "silu", "gelu", "rotary"])
def test_outputs_and_gradients_are_those_of_float64(piece: str) -> None:
    """In fp32: each piece sums up at most a row of 512 numbers, whose rounding is far below a hundred thousandth."""
    ops = pytest.importorskip("liger_kernel.ops")
    gate = torch.nn.functional
    draw = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=draw)

    angles = torch.arange(32, device="cuda")[:, None] / 100 ** (torch.arange(64, device="cuda") % 32 / 32)
    cos, sin = angles.cos()[None], angles.sin()[None]
    cases: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "norm": (
            lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", True),
            rms(0.0), (drawn(64, 512), drawn(512)),
        ),
        "gemma norm": (
            lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 1.0, "gemma", False),
            rms(1.0), (drawn(64, 512), drawn(512)),
        ),
        "silu": (
            ops.LigerSiLUMulFunction.apply,
            lambda a, b: gate.silu(a) * b, (drawn(64, 512), drawn(64, 512)),
        ),
        "gelu": (
            ops.LigerGELUMulFunction.apply,
            lambda a, b: gate.gelu(a, approximate="tanh") * b, (drawn(64, 512), drawn(64, 512)),
        ),
        "rotary": (
            lambda q, k: ops.LigerRopeFunction.apply(q, k, cos, sin),
            lambda q, k: turn(q, k, cos.double(), sin.double()), (drawn(2, 4, 32, 64), drawn(2, 2, 32, 64)),
        ),
    }  # fmt: skip
    fast, slow, inputs = cases[piece]
    mine, exact = [x.clone().requires_grad_() for x in inputs], [x.double().requires_grad_() for x in inputs]
    got, want = fast(*(x * 1 for x in mine)), slow(*exact)  # some write over what they are given
    got, want = (each if isinstance(each, tuple) else (each,) for each in (got, want))
    seen = [each.detach().clone() for each in got]
    grads = [torch.randn_like(each) for each in want]
    torch.autograd.backward(got, [grad.float() for grad in grads])
    torch.autograd.backward(want, [grad.float().double() for grad in grads])
    pairs = [*zip(seen, want, strict=True), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]
    for one, other in pairs:
        assert float((one.double() - other.detach()).norm() / other.detach().norm()) < 1e-5
