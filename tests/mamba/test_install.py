"""Our Mamba inside transformers' models: same logits, same gradients, and out again without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.models.falcon_mamba import modeling_falcon_mamba
from transformers.models.mamba import modeling_mamba

from tightfit.mamba import install as installing
from tightfit.mamba.arguments import ScanError
from tightfit.mamba.install import fuses, install, installed, uninstall

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3}
FP32 = 2e-5
"""Relative error in the norm: some hundred roundings of 6e-8, in both models."""
BF16 = 1.5
"""Against fp32, ours may be at most this much worse than transformers' own; both round in other places."""

families = pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])


@pytest.fixture(autouse=True)
def _leave_transformers_as_it_was() -> Iterator[None]:
    yield
    uninstall()


def model_of(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = SMALL | changes
    model = (
        MambaForCausalLM(MambaConfig(**settings))
        if family == "mamba"
        else FalconMambaForCausalLM(FalconMambaConfig(**settings))
    )
    with torch.no_grad():  # as they come, some weights are zero or all alike, and hide mistakes
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return model.train()


def tokens(length: int = 21) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """Logits and the gradient of every parameter."""
    model.zero_grad()
    ids = tokens()
    found = model(input_ids=ids, labels=ids, use_cache=False, **inputs)
    found.loss.backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}
    return {"logits": found.logits.detach(), **grads}


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == wanted.keys()
    return {
        name: float((got[name].double() - each.double()).norm() / each.double().norm()) for name, each in wanted.items()
    }


def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every fused call."""
    calls: list[int] = []
    real = installing.mamba_mixer

    def counted(*args: Any, **settings: Any) -> Tensor:
        calls.append(1)
        return real(*args, **settings)

    monkeypatch.setattr(installing, "mamba_mixer", counted)
    return calls


@families
@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "use_conv_bias": False}], ids=["usual", "other biases"])
def test_logits_and_all_gradients_in_fp32(family: str, changes: dict[str, bool], monkeypatch: Any) -> None:
    model = model_of(family, **changes)
    wanted = results(model)
    calls = fused_calls(monkeypatch)
    install()
    found = errors(results(model), wanted)
    assert len(calls) == 2
    assert max(found.values()) < FP32, found


@pytest.mark.thorough
@families
def test_logits_and_all_gradients_in_bf16(family: str) -> None:
    model = model_of(family)
    rounded = copy.deepcopy(model).bfloat16()
    exact = results(copy.deepcopy(rounded).float())
    theirs = errors(results(rounded), exact)
    install()
    ours = errors(results(rounded), exact)
    assert all(error < BF16 * theirs[name] + 2**-8 for name, error in ours.items()), (ours, theirs)


@families
def test_padding_is_masked_as_theirs_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, :8] = 0
    wanted = results(model, attention_mask=mask)
    calls = fused_calls(monkeypatch)
    install()
    found = errors(results(model, attention_mask=mask), wanted)
    assert len(calls) == 2
    assert max(found.values()) < FP32, found


@families
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    model = model_of(family)
    install()
    wanted = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    got = results(model)
    assert all(torch.equal(got[name], each) for name, each in wanted.items())


@families
@pytest.mark.parametrize("target", ["x_proj", "dt_proj", "in_proj"])
def test_an_adapter_learns(family: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In in_proj, which the mixer calls, it leaves the rest fused; elsewhere the layer is not fused."""
    from peft import LoraConfig, get_peft_model

    calls = fused_calls(monkeypatch)
    install()
    plain = model_of(family)
    model = get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    got = results(model)
    assert len(calls) == (2 if target == "in_proj" else 0)
    adapters = {name: each for name, each in got.items() if "lora" in name}
    assert len(adapters) == 4
    assert all(each.abs().max() > 0 for each in adapters.values())
    # The adapter counts as if it were merged, so the logits are those of the merged model.
    merged = model.merge_and_unload()
    logits = results(merged.requires_grad_(True))["logits"]
    assert errors({"logits": got["logits"]}, {"logits": logits})["logits"] < FP32


@families
def test_an_adapter_on_x_proj_has_their_gradients(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["x_proj"], init_lora_weights=False)
    model = get_peft_model(model_of(family), config)
    wanted = results(model)
    install()
    assert max(errors(results(model), wanted).values()) < FP32


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["conv1d", "x_proj", "dt_proj", "out_proj"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_is_called(name: str, kind: str) -> None:
    model = model_of("mamba")
    wanted = results(model)
    install()
    seen: list[int] = []
    mixer = model.backbone.layers[0].mixer
    assert fuses(mixer)
    handle = getattr(getattr(mixer, name), kind)(lambda *_: seen.append(1))
    assert not fuses(mixer)
    assert fuses(model.backbone.layers[1].mixer)
    assert max(errors(results(model), wanted).values()) < FP32
    assert seen == [1]
    handle.remove()
    assert fuses(mixer)


def test_a_hook_on_every_module_of_the_process_is_called() -> None:
    model = model_of("mamba")
    install()
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        results(model)
    finally:
        handle.remove()
    assert seen.count("Conv1d") + seen.count("Linear") > 2 * 3  # not in_proj alone


@pytest.mark.thorough
@families
def test_generation_is_the_same(family: str) -> None:
    model = model_of(family).eval()
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :5] = 0
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    for given in ({}, {"attention_mask": mask}):
        wanted = model.generate(tokens(), **settings, **given)
        install()
        assert torch.equal(model.generate(tokens(), **settings, **given), wanted)
        uninstall()


@families
def test_a_prompt_goes_through_our_scan(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family).eval()
    with torch.no_grad():
        wanted = model(tokens(), use_cache=True)
    lengths: list[int] = []
    real = installing.selective_scan

    def counted(u: Tensor, *args: Any, **settings: Any) -> Any:
        lengths.append(u.shape[2])
        return real(u, *args, **settings)

    monkeypatch.setattr(installing, "selective_scan", counted)
    install()
    with torch.no_grad():
        got = model(tokens(), use_cache=True)
    assert lengths == [21, 21]
    assert errors({"": got.logits}, {"": wanted.logits})[""] < FP32


def test_documents_are_kept_apart() -> None:
    """transformers does not pass it on; whoever calls a mixer may."""
    install()
    model = model_of("mamba")
    mixer = model.backbone.layers[0].mixer
    hidden = torch.randn(1, 12, 32)
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, 7] = True
    apart = torch.cat([mixer(hidden[:, :7]), mixer(hidden[:, 7:])], dim=1)
    fused = mixer(hidden, starts=starts)
    assert errors({"": fused.detach()}, {"": apart.detach()})[""] < FP32
    mixer.x_proj.register_forward_hook(lambda *_: None)
    unfused = mixer(hidden, starts=starts)
    assert errors({"": unfused.detach()}, {"": apart.detach()})[""] < FP32
    with pytest.raises(ScanError, match="only without a cache"):
        mixer(hidden, cache_params=object(), starts=starts)


@families
def test_what_a_layer_keeps(family: str) -> None:
    """In bytes a token of a mixer's inside, beside what its parameters and the model's other layers keep."""
    model = model_of(family, num_hidden_layers=1, hidden_size=64).bfloat16()
    mixer = model.backbone.layers[0].mixer
    hidden = torch.randn(1, 256, 64).bfloat16().requires_grad_()
    parameters = {each.data_ptr() for each in model.parameters()}

    def kept_bytes() -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in parameters:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(hidden)
        return sum(kept.values())

    channels, narrow = 128, 3 + 2 * 4
    theirs = kept_bytes()
    install()
    ours = kept_bytes()
    assert ours == 256 * 2 * (64 + 2 * channels + narrow)  # what goes into in_proj, xz, the narrow projection
    assert theirs > 10 * ours


def test_out_again() -> None:
    places = [
        (modeling_mamba, "mamba_inner_fn"),
        (modeling_mamba, "mamba_selective_scan"),
        (modeling_mamba, "causal_conv1d_fn"),
        (modeling_mamba.MambaMixer, "forward"),
        (modeling_falcon_mamba, "mamba_inner_fn"),
        (modeling_falcon_mamba, "mamba_selective_scan"),
        (modeling_falcon_mamba, "causal_conv1d_fn"),
        (modeling_falcon_mamba.FalconMambaMixer, "forward"),
    ]
    before = [getattr(where, name) for where, name in places]
    uninstall()  # nothing is in: nothing happens
    install()
    install()
    assert installed()
    assert all(getattr(where, name) is not each for (where, name), each in zip(places, before, strict=True))
    uninstall()
    assert not installed()
    assert all(getattr(where, name) is each for (where, name), each in zip(places, before, strict=True))
