"""A model and samples of a few kilobytes, for programs that are to fail."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **shape))


def samples(count=8):
    ids = torch.arange(16)
    return [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for _ in range(count)]
