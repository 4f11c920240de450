"""Cross entropy straight from the hidden states, a chunk of tokens at a time.

The plain loss holds the logits of every token at once, three to four times over: in the working
precision, upcast to fp32, as log-probabilities, and again as their gradient. For a vocabulary of 150,000
that is more than a megabyte and a half a token. Here only one chunk of logits exists at any moment, in the working
precision: it becomes its own gradient in place, and that the gradients of the hidden states and of the head, right
away in the forward pass; the backward pass only scales them. The arithmetic is that of the plain loss (fp32 softmax
over logits that were rounded to the working precision); no logit is computed twice. What logits go through before the
softmax (a factor, a soft cap) is computed in fp32 here, and in the working precision by most models themselves.

On a GPU one kernel does that (`loss_kernels.py`). `losses_in_place` does the same in torch: on the CPU, in float64, and
where Triton is missing. It has an fp32 copy beside the logits, and its chunks are smaller.

The alternative, recomputing the logits in the backward pass, would spare the head's gradient between the
two passes and cost one more product with the head; torch's own `linear_cross_entropy` was measured to be
off by percents on bf16 CPUs. The head's gradient is accumulated in its own dtype: within a chunk in fp32, with one
rounding a chunk. Chunks are few, and where there is but one, the gradient is the plain loss's. Measured against float64
in bf16: the plain loss's is off by 0.31 %, that of seven chunks by 0.38 %; the loss itself and the gradients of hidden
states are the plain ones to the rounding of fp32 sums.

fp16 needs care, since gradients are made before the loss scale is known: a token's share of a large window would round
to zero, which the scale is there to prevent. There the gradients of whole tokens are kept, and both the share and
the scale follow in the backward pass, multiplied in fp32.
"""

from __future__ import annotations

from functools import cache
from math import prod
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.memory.loss import fused_chunk_tokens
from tightfit.messages import Message
from tightfit.train.build import body_of
from tightfit.train.distress import find_shortage
from tightfit.types import ConfigError, Loss, ModelError

FP16_AHEAD = 2.0**8
"""fp16 gradients of a token are kept times this: small probabilities are near the smallest number that fp16 has."""
FP16_HEAD = 2.0**-6
"""The head's add up over many tokens, and are kept times this again: they may not overflow on their own."""
PIECE_ELEMENTS = 1 << 22  # widened to fp32 at a time
LOGITS_TIMES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Fields of configs whose number multiplies the logits, or divides them (Granite's)."""
LOGITS_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of configs whose number caps the logits: Gemma's, RecurrentGemma's, xLSTM's."""

# B sequences of L tokens, T = B*L, H hidden, V vocabulary, C tokens of one chunk


class Shaping(NamedTuple):
    """What logits go through between the head and the softmax."""

    times: float = 1.0
    cap: float | None = None  # cap * tanh(logits / cap)


AS_THEY_ARE = Shaping()


def losses_in_place(
    logits_CV: Tensor, labels_C: Tensor, factor: Tensor, shaping: Shaping, *, gradients: bool
) -> Tensor:
    """The loss of each row, 0 where its label is -100; with `gradients` the logits become `factor` times the gradient
    of the sum of these, otherwise anything."""
    kept_C1, target_C1 = (labels_C != -100).unsqueeze(1), labels_C.clamp(min=0).unsqueeze(1)
    probs_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    slope_CV: Tensor | float = shaping.times
    if shaping.times != 1:
        probs_CV.mul_(shaping.times)
    if shaping.cap is not None:
        probs_CV.div_(shaping.cap).tanh_()
        slope_CV = probs_CV.square().sub_(1).mul_(-shaping.times)
        probs_CV.mul_(shaping.cap)
    target_logit_C1 = probs_CV.gather(1, target_C1)
    top_C1 = probs_CV.amax(dim=1, keepdim=True)
    sums_C1 = probs_CV.sub_(top_C1).exp_().sum(dim=1, keepdim=True)
    losses_C1 = sums_C1.log() + top_C1 - target_logit_C1
    if gradients:
        probs_CV.div_(sums_C1)
        probs_CV.scatter_add_(1, target_C1, torch.full_like(target_logit_C1, -1.0))
        logits_CV.copy_(probs_CV.mul_(slope_CV).mul_(kept_C1 * factor))
    return losses_C1.masked_fill(~kept_C1, 0.0).squeeze(1)


def scale_in_place(tensor: Tensor, factor: Tensor) -> Tensor:
    """In fp16 the factor itself may be out of range (a loss scale of 2^16 is), so that is done in fp32."""
    if tensor.dtype != torch.float16:
        return tensor.mul_(factor)
    for piece in torch.split(tensor.view(-1), PIECE_ELEMENTS):
        piece.copy_(piece.float() * factor)
    return tensor


def find_kernels(tensor: Tensor) -> Any:
    """The two functions above as kernels; None: torch computes them, as everywhere but on a GPU."""
    return try_kernels()[0] if tensor.is_cuda and tensor.dtype != torch.float64 else None


@cache
def try_kernels() -> tuple[Any, Message | None]:
    """Run them on a few logits: Triton may be missing, or what it needs to compile. The kernels; or None, and what to
    say of that."""
    try:
        from tightfit.train import loss_kernels

        few, label, one = (torch.zeros(1, 16), torch.zeros(1, dtype=torch.int64), torch.ones(()))
        loss_kernels.losses_in_place(few.cuda(), label.cuda(), one.cuda(), AS_THEY_ARE, gradients=True)
    except Exception as error:
        if find_shortage(error) is not None:  # of torch, or of the driver that loads what Triton made
            raise
        return None, Message("train.no-loss-kernel", why=str(error).partition("\n")[0] or type(error).__name__)
    return loss_kernels, None


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        divisor: float | None,
        shaping: Shaping,
    ) -> Tensor:
        need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        scale = torch.ones((), dtype=wide, device=hidden_TH.device)
        scale /= (labels_T != -100).sum().clamp(min=1) if divisor is None else divisor
        half = hidden_TH.dtype == torch.float16
        factor = torch.full_like(scale, FP16_AHEAD) if half else scale
        head_ahead = FP16_HEAD if half else 1.0
        total = torch.zeros_like(scale)
        grad_hidden_TH = torch.empty_like(hidden_TH) if need_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if need_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if need_bias and bias_V is not None else None
        kernels = find_kernels(hidden_TH)
        differentiate = losses_in_place if kernels is None else kernels.losses_in_place
        (tokens, hidden), vocab, width = hidden_TH.shape, weight_VH.shape[0], hidden_TH.element_size()
        step = fused_chunk_tokens(
            tokens, vocab, hidden, width=width, trains_head=need_weight, kernel=kernels is not None
        )
        for start in range(0, tokens, step):
            piece = slice(start, start + step)
            hidden_CH = hidden_TH[piece]
            logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V)
            gradients = any(ctx.needs_input_grad)
            total += differentiate(logits_CV, labels_T[piece], factor, shaping, gradients=gradients).sum()
            if grad_hidden_TH is not None:
                torch.mm(logits_CV, weight_VH, out=grad_hidden_TH[piece])
            if grad_weight_VH is not None:  # the first chunk's is put where nothing was
                grad_weight_VH.addmm_(logits_CV.t(), hidden_CH, beta=0 if start == 0 else 1, alpha=head_ahead)
            if grad_bias_V is not None:
                grad_bias_V += logits_CV.sum(0, dtype=wide)
            del logits_CV
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH, grad_bias_V)
        ahead = scale / factor if half else 1.0
        ctx.left = (ahead, ahead / head_ahead, ahead)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        kernels = find_kernels(ctx.saved_tensors[0] if ctx.saved_tensors[0] is not None else ctx.saved_tensors[1])
        scale = scale_in_place if kernels is None else kernels.scale_in_place
        made = zip(ctx.saved_tensors, ctx.left, strict=True)
        grads = [None if each is None else scale(each, grad * left) for each, left in made]
        return *grads, None, None, None


def shift(labels_BL: Tensor) -> Tensor:
    """For each token the label of the next one in its row; the last has none."""
    return torch.nn.functional.pad(labels_BL, (0, 1), value=-100)[..., 1:]


def linear_cross_entropy(
    hidden_BLH: Tensor,
    weight_VH: Tensor,
    labels_BL: Tensor,
    divisor: float | None = None,
    *,
    bias_V: Tensor | None = None,
    shaping: Shaping = AS_THEY_ARE,
    shifted: bool = False,
) -> Tensor:
    """Next-token loss of the logits `hidden @ weight.T + bias` against `labels` shifted by one, unless they are
    `shifted` already; -100 is ignored. The sum over tokens is divided by `divisor`; None: by their number, which gives
    the mean."""
    labels_T = (labels_BL if shifted else shift(labels_BL)).reshape(-1)
    hidden_TH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])
    if not torch.is_grad_enabled():  # a Function is told that a parameter wants its gradient all the same
        weight_VH, bias_V = weight_VH.detach(), None if bias_V is None else bias_V.detach()
    loss: Tensor = _ChunkedLinearCrossEntropy.apply(hidden_TH, weight_VH, bias_V, labels_T, divisor, shaping)  # type: ignore[no-untyped-call]
    return loss


class LossAlone(dict[str, Tensor]):
    """What a model without logits returns. DeepSpeed looks for tensors in tuples, lists and dictionaries: from the
    loss's hook it learns that a backward pass begins, and whether it is the last of a window. FSDP2 looks into types
    that torch's trees know alone, and so leaves what the root has gathered where the head put it."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


class WindowLoss:
    """The loss of a micro batch as its share of the whole window's mean.

    A window is what one optimizer step is made of: every micro batch of every rank. Its loss is the mean over its
    tokens, whichever micro batch they fell into, so that another split of the same window trains the same. Each
    micro batch's sum is therefore divided by the tokens of the window, which `divisor` holds, set before each pass.
    """

    def __init__(self, model: Any, kind: Loss, *, shifted: bool = False) -> None:
        """`shifted`: every token comes with the label of the next one, as those do that are a part of a row."""
        self.divisor = 1.0
        body = body_of(model)
        if kind == "plain":
            # Models of older libraries, or with code of their own, may take the mean of each micro batch themselves.
            asked = False

            def plain(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
                from transformers.loss.loss_utils import ForCausalLMLoss

                nonlocal asked
                asked = True
                loss: Tensor = ForCausalLMLoss(
                    logits,
                    labels,
                    vocab_size,
                    num_items_in_batch=self.divisor,
                    shift_labels=labels if shifted else None,
                )
                return loss

            def check(body: Any, _: Any, output: Any) -> None:
                if not asked and not isinstance(output, Tensor):  # which a stage below the last of a pipeline returns
                    raise ModelError(Message("train.own-loss", model=type(body).__name__))

            body.loss_function = plain
            body.register_forward_hook(check)
        else:
            # Inside the head's own forward, so that an engine that gathers its weight does so for the loss.
            head, divide = body.get_output_embeddings(), self
            if hasattr(head, "base_layer"):  # PEFT's: its `weight` is the matrix without the adapter
                raise ConfigError(Message("train.head-adapter"))
            factors = {key: getattr(body.config, key, None) for key in LOGITS_TIMES}
            times = prod(float(value) ** LOGITS_TIMES[key] for key, value in factors.items() if value is not None)
            caps = [getattr(body.config, key, None) for key in LOGITS_CAPS]
            shaping = Shaping(times, next((float(cap) for cap in caps if cap is not None), None))

            def head_forward(self: Any, hidden: Tensor) -> Tensor:
                hidden = hidden.to(self.weight.dtype)
                bias = getattr(self, "bias", None)
                return linear_cross_entropy(
                    hidden, self.weight, self.labels, divide.divisor, bias_V=bias, shaping=shaping, shifted=shifted
                )

            def forward(self: Any, labels: Tensor, **options: Any) -> Any:
                hidden = getattr(self, self.base_model_prefix)(**options)[0]
                head.labels = labels
                return LossAlone(loss=head(hidden))

            head.forward = MethodType(head_forward, head)
            body.forward = MethodType(forward, body)
