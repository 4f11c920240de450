"""What litgpt's own model classes hold at their worst moment, which is no layer of Hugging Face's.

Read from litgpt at 8641822, the commit that its table of memory names, with PyTorch 2.1 and bitsandbytes 0.41.1:

- finetune/lora.py takes the longest sample first, before there are gradients or states of the optimizer.
- lm_head makes its logits 128 tokens at a time and returns all of them. Lightning's `bf16-true` turns what a model
  returns into fp32 (`HalfPrecision.convert_output`), and the script's variable holds that to the end of the step. The
  loss keeps the log-probabilities. So all logits are there twice, in fp32; only their gradients are made in pieces.
- `LoRAQKVLinear.zero_pad` writes the adapter's output into a tensor of zeros with `index_copy`, which keeps it.
- One product makes q, k and v. v is a view of it, so the attention kernel keeps all three; q and k beside them, as
  they were put together after the rotary embedding.
- RMSNorm in fp32 came with 6178c7c, three days before the table was merged. From one sequence to two, the published
  peaks of Llama grow by what it keeps, and by more than the norm in bf16 before it could.
- bitsandbytes keeps the input of every product with 4-bit weights (`MatMul4Bit`: `ctx.tensors = (A, B)`), though
  nothing trains in it. litgpt has the head in 4 bits too. Lightning packs weights from fp16 (`_quantize_weight`), so
  that a matrix is unpacked to fp16 and then copied to bf16.
"""

from __future__ import annotations

from tightfit.memory.operations import BOOL, FP32
from tightfit.memory.weights import NF4_BLOCK, NF4_NESTED_BLOCK
from tightfit.types import Attention, Block, Levers, Mlp, ModelShape

BF16 = 2
CHUNK_TOKENS = 128


def peak_bytes(shape: ModelShape, levers: Levers, *, double_quantised: bool, workspaces: int) -> int:
    """Of LoRA on query and value, on one GPU, without checkpointing."""
    assert levers.lora is not None
    packed = levers.method == "qlora"
    tokens = levers.micro_batch * levers.sequence
    blocks = [shape.blocks[kind] for kind in shape.pattern]
    layers = [
        _kept_by_layer(block, shape.hidden_size, levers.lora.rank, packed=packed, first=place == 0)
        for place, block in enumerate(blocks)
    ]
    head_input = BF16 if packed else 0
    top = shape.hidden_size * (_norm_width(shape.final_norm) + head_input)
    kept = tokens * (sum(layers) + top + 2 * FP32 * shape.vocab_size)
    # The gradients of one piece of logits: of the log-probabilities, then of the logits.
    pieces = 2 * FP32 * min(CHUNK_TOKENS, levers.sequence) * levers.micro_batch * shape.vocab_size
    unpacked = 2 * BF16 * shape.vocab_size * shape.hidden_size if packed else 0
    return _weights(shape, packed=packed, double_quantised=double_quantised) + kept + max(pieces, unpacked) + workspaces


def _kept_by_layer(block: Block, hidden: int, rank: int, *, packed: bool, first: bool) -> int:
    """Bytes a token. Nothing trains below the first layer: what is known by its input alone is not kept there."""
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, Mlp)
    parallel = block.arrangement == "parallel"
    wide, grouped = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    below = hidden * (_norm_width(block.norm) + BOOL + (BF16 if packed else 0))  # the norm, dropout's mask, a product
    attention = BF16 * (hidden + 2 * rank + wide + grouped)  # dropout's output, of A, of B for query and value
    # Grouped heads are repeated, which leaves the product.
    attention += BF16 * (3 * wide if mixer.kv_heads == mixer.heads else wide)
    attention += BF16 * 3 * wide + FP32 * mixer.heads  # q, k, the output, the row sums
    fed = BF16 * mlp.intermediate * ((3 if mlp.gated else 1) + (1 if packed else 0))
    if not parallel:
        fed += hidden * _norm_width(block.norm)
    if packed and (not parallel or "post_attention_layernorm.weight" in {tensor.name for tensor in block.tensors}):
        fed += BF16 * hidden
    if not first:
        return below + attention + fed
    return attention + (0 if parallel else fed)


def _norm_width(kind: str) -> int:
    return BF16 if kind == "layer" else FP32


def _weights(shape: ModelShape, *, packed: bool, double_quantised: bool) -> int:
    """Everything but the embedding is packed. Adapters are too small to matter."""
    if not packed:
        return BF16 * shape.parameters
    embeddings = {tensor.name for tensor in shape.before}
    total = 0
    for tensor in shape.tensors:
        if not tensor.is_linear or tensor.name in embeddings:
            total += BF16 * tensor.numel
            continue
        scales = tensor.numel // NF4_BLOCK
        total += tensor.numel // 2
        total += scales + FP32 * (scales // NF4_NESTED_BLOCK) if double_quantised else FP32 * scales
    return total
