"""Model families by Hugging Face's `model_type`: from a config to its exact tensors, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tightfit.inputs.spelling import shown
from tightfit.messages import Message
from tightfit.model.families import gpt, llama_like, mamba
from tightfit.model.families.reader import MAX_PARAMETERS, ConfigReader, NotByName, did_you_mean
from tightfit.types import ModelError, ModelShape

__all__ = ["FAMILIES", "ConfigReader", "NotByName", "did_you_mean", "read"]


FAMILIES: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    **dict.fromkeys(llama_like.VARIANTS, llama_like.shape),
    "gpt2": gpt.gpt2,
    "gpt_neox": gpt.gpt_neox,
    "mamba": mamba.shape,
    "falcon_mamba": mamba.shape,
    "mamba2": mamba.shape2,
}

_GEMMA3_TEXT_SIZES = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
"""What transformers assumes where a wrapper's `text_config`, saved as differences from its class, leaves them out."""


def read(config: Mapping[str, object], model: str) -> tuple[ModelShape, ConfigReader]:
    """The shape, and the reader that knows which keys it took."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(
            Message("model.mamba-ssm-format" if "ssm_cfg" in config else "model.no-type", model=shown(model))
        )
    if model_type == "gemma3":
        # The multimodal wrapper: the language model inside it is what gets trained on text.
        wrapper = ConfigReader(config, model=model, model_type="gemma3")
        text = wrapper.section("text_config")
        if text is None:
            raise wrapper.fail("model.no-text-config")
        shape, reader = read({**_GEMMA3_TEXT_SIZES, **text, "model_type": "gemma3_text"}, model)
        return replace(shape, notes=(*shape.notes, Message("model.language-model-only"))), reader
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(model_type, FAMILIES)
        raise NotByName(model, Message("model.a-type", model_type=shown(model_type), hint=hint))
    if config.get("per_layer_config") is not None:
        raise NotByName(model, Message("model.layers-that-differ"))
    reader = ConfigReader(config, model=model, model_type=model_type)
    reader.has("model_type")
    shape = FAMILIES[model_type](reader)
    if shape.parameters > MAX_PARAMETERS:
        raise reader.fail("model.too-many-parameters", parameters=shape.parameters, max_parameters=MAX_PARAMETERS)
    return shape, reader
