"""Cross entropy straight from the hidden states, a chunk of tokens at a time.

The plain loss holds the logits of every token at once, three to four times over: in the working
precision, upcast to fp32, as log-probabilities, and again as their gradient. For a vocabulary of 150,000
that is more than a megabyte and a half a token. Here only one chunk of logits exists at any moment: its
probabilities become the gradient of the hidden states and of the head right away, in the forward pass, and
the backward pass only scales them. The arithmetic is that of the plain loss (fp32 softmax over logits that
were rounded to the working precision); no logit is computed twice.

The alternative, recomputing the logits in the backward pass, would spare the head's gradient between the
two passes and cost one more product with the head; torch's own `linear_cross_entropy` was measured to be
off by percents on bf16 CPUs. The head's gradient is accumulated in its own dtype, with one rounding a chunk.

fp16 needs care, since gradients are made before the loss scale is known: a token's share of a large window would round
to zero, which the scale is there to prevent. There the gradients of whole tokens are kept, and both the share and
the scale follow in the backward pass, multiplied in fp32.
"""

from __future__ import annotations

from math import prod
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tightfit.memory.loss import fused_chunk_tokens
from tightfit.messages import Message
from tightfit.train.build import body_of
from tightfit.types import ConfigError, Loss, ModelError

FP16_AHEAD = 2.0**8
"""fp16 gradients of a token are kept times this: small probabilities are near the smallest number that fp16 has."""
FP16_HEAD = 2.0**-6
"""The head's add up over many tokens, and are kept times this again: they may not overflow on their own."""
PIECE_ELEMENTS = 1 << 22  # widened to fp32 at a time
LOGITS_TIMES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Fields of configs whose number multiplies the logits, or divides them (Granite's)."""

# B sequences of L tokens, T = B*L, H hidden, V vocabulary, C tokens of one chunk


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, divisor: float | None, times: float
    ) -> Tensor:
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        kept_T = labels_T != -100
        scale = 1.0 / kept_T.sum().clamp(min=1) if divisor is None else 1.0 / divisor
        half = hidden_TH.dtype == torch.float16
        ahead = FP16_AHEAD if half else scale
        head_ahead = FP16_HEAD if half else 1.0
        total = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
        grad_hidden_TH = torch.empty_like(hidden_TH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if need_weight else None
        step = fused_chunk_tokens(vocab=weight_VH.shape[0])
        for start in range(0, hidden_TH.shape[0], step):
            piece = slice(start, start + step)
            hidden_CH, kept_C = hidden_TH[piece], kept_T[piece]
            target_C1 = labels_T[piece].clamp(min=0).unsqueeze(1)
            logits_CV = hidden_CH @ weight_VH.t()
            probs_CV = logits_CV.float()
            if times != 1:
                probs_CV.mul_(times)
            target_logit_C1 = probs_CV.gather(1, target_C1)
            top_C1 = probs_CV.amax(dim=1, keepdim=True)
            sums_C1 = probs_CV.sub_(top_C1).exp_().sum(dim=1, keepdim=True)
            losses_C1 = sums_C1.log() + top_C1 - target_logit_C1
            total += (losses_C1.squeeze(1) * kept_C).sum()
            if grad_hidden_TH is None and grad_weight_VH is None:
                continue
            probs_CV.div_(sums_C1)
            probs_CV.scatter_add_(1, target_C1, torch.full_like(target_logit_C1, -1.0))
            probs_CV.mul_((kept_C * (ahead * times)).unsqueeze(1))
            grads_CV = logits_CV.copy_(probs_CV)
            if grad_hidden_TH is not None:
                torch.mm(grads_CV, weight_VH, out=grad_hidden_TH[piece])
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grads_CV.t(), hidden_CH, alpha=head_ahead)
            del logits_CV, probs_CV, grads_CV
        ctx.save_for_backward(*(grad for grad in (grad_hidden_TH, grad_weight_VH) if grad is not None))
        ctx.left = (scale / ahead, scale / ahead / head_ahead) if half else (1.0, 1.0)
        return total * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved = list(ctx.saved_tensors)
        need_hidden, need_weight, *_ = ctx.needs_input_grad
        of_hidden, of_weight = ctx.left
        grad_hidden_TH = _scale_in_place(saved.pop(0), grad * of_hidden) if need_hidden else None
        grad_weight_VH = _scale_in_place(saved.pop(0), grad * of_weight) if need_weight else None
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _scale_in_place(tensor: Tensor, factor: Tensor) -> Tensor:
    """In place. In fp16 the factor itself may be out of range (a loss scale of 2^16 is), so that is done in fp32."""
    if tensor.dtype != torch.float16:
        return tensor.mul_(factor)
    for piece in torch.split(tensor.view(-1), PIECE_ELEMENTS):
        piece.copy_(piece.float() * factor)
    return tensor


def linear_cross_entropy(
    hidden_BLH: Tensor, weight_VH: Tensor, labels_BL: Tensor, divisor: float | None = None, times: float = 1.0
) -> Tensor:
    """Next-token loss of `hidden @ weight.T * times` against `labels` shifted by one; -100 is ignored. The sum over
    tokens is divided by `divisor`; None: by their number, which gives the mean."""
    labels_T = torch.nn.functional.pad(labels_BL, (0, 1), value=-100)[..., 1:].reshape(-1)
    hidden_TH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])
    if not torch.is_grad_enabled():
        weight_VH = weight_VH.detach()  # a Function is told that a parameter wants its gradient all the same
    loss: Tensor = _ChunkedLinearCrossEntropy.apply(hidden_TH, weight_VH, labels_T, divisor, times)  # type: ignore[no-untyped-call]
    return loss


class WindowLoss:
    """The loss of a micro batch as its share of the whole window's mean.

    A window is what one optimizer step is made of: every micro batch of every rank. Its loss is the mean over its
    tokens, whichever micro batch they fell into, so that another split of the same window trains the same. Each
    micro batch's sum is therefore divided by the tokens of the window, which `divisor` holds, set before each pass.
    """

    def __init__(self, model: Any, kind: Loss) -> None:
        self.divisor = 1.0
        body = body_of(model)
        if kind == "plain":
            # Models of older libraries, or with code of their own, may take the mean of each micro batch themselves.
            asked = False

            def plain(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
                from transformers.loss.loss_utils import ForCausalLMLoss

                nonlocal asked
                asked = True
                loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=self.divisor)
                return loss

            def check(body: Any, *_: Any) -> None:
                if not asked:
                    raise ModelError(Message("train.own-loss", model=type(body).__name__))

            body.loss_function = plain
            body.register_forward_hook(check)
        else:
            # Inside the head's own forward, so that an engine that gathers its weight does so for the loss.
            head, divide = body.get_output_embeddings(), self
            factors = {key: getattr(body.config, key, None) for key in LOGITS_TIMES}
            times = prod(float(value) ** LOGITS_TIMES[key] for key, value in factors.items() if value is not None)
            capped = getattr(body.config, "final_logit_softcapping", None) is not None
            if getattr(head, "bias", None) is not None or capped:
                raise ConfigError(Message("train.no-fused-loss", model=type(body).__name__))

            def head_forward(self: Any, hidden: Tensor) -> Tensor:
                hidden = hidden.to(self.weight.dtype)
                return linear_cross_entropy(hidden, self.weight, self.labels, divide.divisor, times)

            def forward(self: Any, input_ids: Tensor, labels: Tensor, **options: Any) -> Any:
                hidden = getattr(self, self.base_model_prefix)(input_ids=input_ids, **options)[0]
                head.labels = labels
                return SimpleNamespace(loss=head(hidden))

            head.forward = MethodType(head_forward, head)
            body.forward = MethodType(forward, body)
