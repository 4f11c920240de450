"""What autograd keeps of a whole model, from the embedding to the loss."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.train.loss import linear_cross_entropy

BATCH, SEQUENCE = 2, 48
WORDS = 1024


def saved_bytes(model: Any, run: Any) -> int:
    """Distinct storages that autograd keeps, parameters and buffers left out."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in seen.values())


def forward(model: Any, *, fused: bool) -> Any:
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE))
    if not fused:
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss
    body = getattr(model, model.base_model_prefix)
    head = model.get_output_embeddings().weight
    return lambda: linear_cross_entropy(body(input_ids=ids, use_cache=False)[0].to(head.dtype), head, ids)
