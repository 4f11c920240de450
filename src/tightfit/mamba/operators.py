"""Our kernels as operators of PyTorch: one node each for torch.compile, for a recomputation that chooses what it keeps,
and for tensors without numbers. None of them looks inside: a trace of a scan on a CPU would write out every step.

An operator is a function of tensors and plain values. What it returns is new: a part that does not exist, or that
nobody wants, is a tensor without elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]

LIBRARY = torch.library.Library("tightfit", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator:
    """`shape` returns what `run` does, without its numbers: sizes, strides and dtypes.

    Where nobody watches, `run` is called without the dispatcher: its way through Python takes as long as the launches.
    """

    def __init__(self, schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"tightfit::{name}", shape, lib=LIBRARY)
        self._watched = getattr(torch.ops.tightfit, name).default
        self._run = self._plain = run

    def __call__(self, *given: Any) -> Any:
        return self._watched(*given) if is_watched(given[0]) else self._plain(*given)

    def differentiate(
        self, keep: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
    ) -> None:  # fmt: skip
        """`keep(ctx, inputs, outputs)` saves what `backward(ctx, *wanted)` needs. What nobody wants is None there."""
        run = self._run

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
