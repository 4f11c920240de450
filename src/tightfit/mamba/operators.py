"""Our kernels as operators of PyTorch: one node each for torch.compile, for a recomputation that chooses what it keeps,
and for tensors without numbers. None of them looks inside: a trace of a scan on a CPU would write out every step.

An operator is a function of tensors and plain values. What it returns is new: a part that does not exist, or that
nobody wants, is a tensor without elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Function = TypeVar("Function", bound=Callable[..., Any])

LIBRARY = torch.library.Library("tightfit", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator:
    """Has its functions from decorators, as those of `torch.library.custom_op` have: what it computes, the shapes of
    that, and for one with a gradient what it keeps and how it is differentiated, in this order.

    Where nobody watches, they are called without the dispatcher: its way through Python takes as long as the launches.
    """

    _run: Callable[..., Any]  # what it computes
    _plain: Callable[..., Any]  # the same, for autograd if it has a gradient
    _keep: Callable[[Any, tuple[Any, ...], Any], None]

    def __init__(self, schema: str) -> None:
        self._name = schema.partition("(")[0]
        LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        self._watched = getattr(torch.ops.tightfit, self._name).default

    def __call__(self, *given: Any) -> Any:
        return self._watched(*given) if is_watched(given[0]) else self._plain(*given)

    def computes(self, run: Function) -> Function:
        LIBRARY.impl(self._name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self._run = self._plain = run
        return run

    def shapes(self, shape: Function) -> Function:
        """It returns what the operator computes, without its numbers: sizes, strides and dtypes."""
        torch.library.register_fake(f"tightfit::{self._name}", shape, lib=LIBRARY)
        return shape

    def keeps(self, keep: Function) -> Function:
        """`keep(ctx, inputs, outputs)` saves what the backward pass needs."""
        self._keep = keep
        return keep

    def differentiates(self, backward: Function) -> Function:
        """`backward(ctx, *wanted)` returns the gradients of the inputs. What nobody wants is None there."""
        run, keep = self._run, self._keep

        def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(False)  # zeros as large as the states that are kept
            keep(ctx, inputs, output)

        class Plain(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                output = run(*given)
                set_up(ctx, given, output)
                return output

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *wanted: Any) -> Any:
                return backward(ctx, *wanted)

        torch.library.register_autograd(self._watched, backward, setup_context=set_up, lib=LIBRARY)
        self._plain = Plain.apply
        return backward


def is_watched(first: Tensor) -> bool:
    """Whether a compiler traces it, a mode looks at every operator, or the tensor is not an ordinary one."""
    return (
        torch.compiler.is_compiling()
        or type(first) not in (Tensor, torch.nn.Parameter)
        or first.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    )


def absent(beside: Tensor) -> Tensor:
    """What stands for an output that is not there."""
    return beside.new_empty(0)
