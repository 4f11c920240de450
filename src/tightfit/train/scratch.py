"""Weights of a new model, drawn per tensor from seed and name.

Every engine, stage, world and split must start from the same model, and no process may hold a whole copy of
it. So no number may depend on what was drawn before it: a tensor is cut into blocks of fixed length, and each
block has a generator of its own, seeded by a hash of (seed, name of the tensor, number of the block). A read
of any range draws the blocks that cover it, and nothing else.

Which distribution a tensor gets is not written here a second time. transformers' own `_init_weights` runs
over the model on the meta device, module by module in transformers' order, under a dispatch mode that notes
which in-place operators reach which parameter: `normal_(0, 0.02)`, or `uniform_`, `div_` for Mamba's output
projections. These notes are the rule, and a block is drawn by replaying them on it. Tensors that an
initialisation makes in order to copy them (`log(1..N)` for A_log, the inverse softplus for the time step) are
made on the CPU, with torch's global generator seeded from seed and module name: they are small, and kept.

What `_init_weights` leaves alone, or does in a way that cannot be noted (an orthogonal matrix), falls back on
the habits of the library: ones for the weights of norms, zeros for biases, a normal of `initializer_range`
for the rest. PEFT's adapters have PEFT's rule, wherever they sit. Buffers that the initialisation fills
(rotary frequencies) can be read as well, by their names.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.messages import Message
from tightfit.train.shards import plain_name
from tightfit.types import ModelError

BLOCK = 2**20  # elements that share a generator; changing it changes every new model
LARGEST_KEPT = 2**26  # elements of a copied-in tensor that may be kept whole; larger ones fall back on the habits
DEFAULT_STD = 0.02
_SOURCES = {"normal_", "uniform_", "fill_", "zero_"}  # what overwrites: whatever came before is forgotten
_POINTWISE = {"add_", "sub_", "mul_", "div_", "neg_", "exp_", "log_", "sqrt_", "abs_", "erfinv_", "clamp_"}
"""What changes each element by itself, so that it can be replayed on any block."""
_FACTORIES = {"arange", "rand", "randn", "ones", "zeros", "full", "empty", "linspace", "randint", "scalar_tensor"}


InitStep = tuple[str, tuple[Any, ...], dict[str, Any]]
"""One in-place operator with its arguments, as torch will be asked to repeat it."""


@dataclass(frozen=True)
class InitRule:
    """How a tensor is made: from the first step on, or from a kept tensor (flat)."""

    steps: tuple[InitStep, ...]
    kept: torch.Tensor | None = None
    patches: tuple[tuple[int, int, float], ...] = ()
    """Stretches, from and to, that have one value whatever the rest is: the row of a padding token."""


class Scratch:
    """A source of weights for a model that does not exist yet. `model` is on the meta device."""

    def __init__(self, model: torch.nn.Module, seed: int, *, threads: int | None = None) -> None:
        self._seed = seed
        self._threads = threads or max(1, min(16, len(os.sched_getaffinity(0))))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        # Of a tied parameter all names lead to the first, and so do those that it has without adapters around it.
        names = {name: first[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
        self._first_names = {plain_name(name): owner for name, owner in names.items()} | names
        # For each parameter, under its first name, what transformers' own initialisation does to it.
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items()}
        recorder = _Recorder(by_storage, {name: tensor.numel() for name, tensor in tensors.items()})
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for path, module, initialise in _in_order(model, "", None):
                own = dict(module.named_parameters(path, recurse=False))
                # A module whose parameters all belong to another: a tied head is not drawn, it is the embedding.
                borrows = own and all(by_storage[p.untyped_storage()._cdata] != name for name, p in own.items())
                if initialise is None or borrows:
                    continue
                # Not torch.manual_seed, which would seed the GPUs as well, now or when they are first used.
                torch.default_generator.manual_seed(seed_of(seed, plain_name(f"{path}."), 0))
                # One that looks at values, of which there are none on the meta device, ends here: what it has noted so
                # far stands; the habits answer for the rest.
                with recorder, suppress(RuntimeError, NotImplementedError):
                    initialise(module)
        recorded = {name: rule for name, rule in recorder.rules.items() if rule is not None}
        config: Any = getattr(model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        std = float(getattr(config, "initializer_range", None) or DEFAULT_STD)
        self._rules = recorded | {
            name: choose_rule(name, shape, std, recorded.get(name)) for name, shape in shapes.items()
        }

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the tensor in row-major order: fp32, on the CPU, one dimension."""
        first = self._first_names.get(name, name)
        rule = self._rules.get(first)
        if rule is None:
            raise ModelError(Message("train.cannot-initialise", name=name))
        numel = math.prod(shape)
        result = torch.empty(stop - start, dtype=torch.float32)

        def draw(block: int, drawn: torch.Tensor) -> torch.Tensor:
            low = block * BLOCK
            if rule.kept is not None:
                drawn.copy_(rule.kept[low : low + drawn.numel()])
            generator = torch.Generator().manual_seed(seed_of(self._seed, plain_name(first), block))
            for operator, arguments, named in rule.steps:
                drawing = {"generator": generator} if operator in ("normal_", "uniform_") else {}
                getattr(drawn, operator)(*arguments, **named, **drawing)
            for begin, end, value in rule.patches:
                drawn[max(begin - low, 0) : max(end - low, 0)] = value
            return drawn

        blocks = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        whole = [block for block in blocks if block * BLOCK >= start and min((block + 1) * BLOCK, numel) <= stop]
        # Threads draw whole blocks where they belong and allocate nothing: each may have a heap of its own, of which
        # glibc keeps several MiB for good, and there are up to eight heaps a core.
        places = [result[block * BLOCK - start : (block + 1) * BLOCK - start] for block in whole]
        if len(whole) > 1:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(draw, whole, places))
        else:
            list(map(draw, whole, places))
        for block in sorted({*blocks} - {*whole}):  # the first and the last one may be cut
            low, high = block * BLOCK, min((block + 1) * BLOCK, numel)
            drawn = draw(block, torch.empty(high - low, dtype=torch.float32))[max(start - low, 0) : stop - low]
            result[max(low - start, 0) : max(low - start, 0) + drawn.numel()] = drawn
        return result


def seed_of(seed: int, name: str, block: int) -> int:
    """A 63-bit seed that is the same in every process, Python and machine."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in-place operators on known storages. Factories make real tensors, on the CPU."""

    def __init__(self, names: Mapping[int, str], numels: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._numels = names, numels
        self.rules: dict[str, InitRule | None] = {}  # None: touched in a way that cannot be repeated

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        operator = func.overloadpacket.__name__
        if operator in _FACTORIES and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        target: Any = args[0] if args else None
        is_noted = isinstance(target, torch.Tensor) and target.device.type == "meta"
        name = self._names.get(target.untyped_storage()._cdata) if is_noted else None
        if name is None or not operator.endswith("_") or operator.startswith("_"):
            return func(*args, **kwargs)
        self.rules[name] = self._after(name, operator, target, args[1:], kwargs)
        return target

    def _after(
        self, name: str, operator: str, target: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> InitRule | None:
        """The rule with this operator; None: it cannot be repeated."""
        before = self.rules.get(name)
        if target.numel() != self._numels[name] or not target.is_contiguous():  # a part of it
            if operator in ("zero_", "fill_") and target.is_contiguous() and before is not None:
                low = int(target.storage_offset())
                patch = low, low + target.numel(), float(arguments[0]) if arguments else 0.0
                return InitRule(before.steps, before.kept, (*before.patches, patch))
            return None
        if operator == "copy_":
            other = arguments[0]
            if not isinstance(other, torch.Tensor) or other.device.type == "meta" or target.numel() > LARGEST_KEPT:
                return None
            return InitRule((), other.detach().to(torch.float32).expand(target.shape).reshape(-1).clone())
        values = tuple(_number(value) for value in arguments)
        keywords = {key: _number(value) for key, value in named.items() if key != "generator"}
        if any(isinstance(value, torch.Tensor) for value in (*values, *keywords.values())):
            return None
        step = operator, values, keywords
        if operator in _SOURCES:
            return InitRule((step,))
        if operator in _POINTWISE and before is not None and not before.patches:
            return InitRule((*before.steps, step), before.kept)
        return None


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return value.item()
    return value


def _in_order(
    module: torch.nn.Module, path: str, initialise: Callable[[torch.nn.Module], None] | None
) -> Iterator[tuple[str, torch.nn.Module, Callable[[torch.nn.Module], None] | None]]:
    """Modules as transformers visits them: children first, each by the innermost model that holds it."""
    if hasattr(module, "_init_weights") and hasattr(module, "config"):
        initialise = module._init_weights  # type: ignore[assignment]
    for name, child in module.named_children():
        yield from _in_order(child, f"{path}.{name}" if path else name, initialise)
    yield path, module, initialise


def _rule(operator: str, *arguments: float) -> InitRule:
    return InitRule(((operator, arguments, {}),))


def choose_rule(name: str, shape: tuple[int, ...], std: float, recorded: InitRule | None) -> InitRule:
    """Of adapters PEFT's `reset_lora_parameters`: A kaiming-uniform with a = sqrt(5), B zero; the reverse for
    embeddings. Then what was noted, and what the library does with tensors that no model's own initialisation knows."""
    if ".lora_B." in name or ".lora_embedding_A." in name:
        return _rule("zero_")
    if ".lora_embedding_B." in name:
        return _rule("normal_", 0.0, 1.0)
    if ".lora_A." in name:
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        return _rule("uniform_", -bound, bound)
    if recorded is not None:
        return recorded
    if name.endswith("bias"):
        return _rule("zero_")
    if len(shape) <= 1 and ("norm" in name.lower() or "ln_" in name or name.rpartition(".")[2] == "weight"):
        return _rule("fill_", 1.0)
    return _rule("normal_", 0.0, std)
