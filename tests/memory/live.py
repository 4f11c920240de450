"""What is there at the worst moment of a pass: a dispatch mode that sees every tensor come.

Storages are asked for their size again and again, since `fully_shard` frees a parameter by shrinking its storage.
"""

from __future__ import annotations

from typing import Any


def live_mode(at_rest: list[Any]) -> Any:
    """A context that counts in its `peak`; what is `at_rest` is left out."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def key_of(tensor: Any) -> int:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)

    resting = {key_of(tensor) for tensor in at_rest}

    class Live(TorchDispatchMode):  # type: ignore[misc]
        """Bytes of all storages that it has met, as they are now."""

        known: dict[int, Any] = {}  # noqa: RUF012 -- one for the process: a parameter's storage outlives the mode
        peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves((args, kwargs, out)):
                if isinstance(tensor, torch.Tensor) and key_of(tensor) not in resting:
                    storage = tensor.untyped_storage()
                    self.known[int(storage._cdata)] = StorageWeakRef(storage)
            self.peak = max(self.peak, self.now())
            return out

        def now(self) -> int:
            total = 0
            for key, weak in list(self.known.items()):
                storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
                if storage is None:
                    del self.known[key]
                else:
                    total += storage.nbytes()
            return total

    return Live()
