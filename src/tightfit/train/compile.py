"""Layers as code that torch.compile makes of them.

Compiled is the inside of a layer and nothing around it: the instance's `forward` is replaced, so that `__call__` still
runs the hooks with which FSDP2 gathers and DeepSpeed watches, and none of them is ever traced. All layers go through
one function that is handed the layer: torch keeps its code by function and guards what that read of the layer, and as
parameters are inputs of the code, every layer of a kind finds the code of the first. There is another for a layer whose
input has no gradient (the lowest above frozen embeddings), for evaluation, and for each length of the rows.

A layer is one graph or none. What torch breaks into pieces would keep other tensors than were priced, and a product
that is recomputed could not be told from one that is kept. So a kind of layer in which torch finds what it cannot
trace, or for which its compiler fails, runs as it is written, and one sentence says so.

Recomputation is part of the graph: a checkpoint inside the function marks what is computed again, and what of that
nobody needs, such as the layer's last product, is dropped. What waits on the host is sent there from outside: see
to_host.py.

The code of the backward pass would be made when that pass first runs, where there is no way back. It is made with the
forward's.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.inputs.surroundings import CODE_FOLDER, cores, inherited, is_installed, is_set_by_user, set_variable
from tightfit.messages import Message, Said, say_why
from tightfit.runs.disk import room
from tightfit.runs.folder import COMPILED
from tightfit.runs.hang import START_S
from tightfit.train.build import number_layers
from tightfit.train.data.samples import MULTIPLE
from tightfit.train.events import Events
from tightfit.train.place import Place
from tightfit.train.recompute import Contexts, inside
from tightfit.train.stop import do_before_leaving
from tightfit.train.to_host import HostStore
from tightfit.types import Checkpointing, Levers

BACKEND = "inductor"  # the compiler, by torch's name for it
MOST_VARIANTS = 64
"""Codes that torch keeps for all layers together: kinds of layers, with and without a gradient, times the lengths of
rows. Its own limit of 8 is made for functions whose arguments surprise it; here every variant is known beforehand."""
LIMIT_ERRORS = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
"""What torch raises at its limit, by the names of several releases. By their class these are no compiler's errors."""
HALVINGS = 4
"""How often the length of full rows may be halved for shorter ones. Each length is compiled when it first comes; a row
is padded to less than twice its length unless it is shorter than a sixteenth of a full one."""
EAGER_BACKWARD = "force_non_lazy_backward_lowering"  # torch's switch: the backward's code is made with the forward's
ROOM_BYTES = 1 << 28  # free where the code is to lie: it is a few MiB for each variant, and a full disk tears it
MOST_PROCESSES = 4
"""Processes with which a rank's compiler makes its kernels side by side. Its own number is that of all cores, on every
rank of a machine, and each of them loads torch and Triton into the host's memory."""
PROCESSES = "TORCHINDUCTOR_COMPILE_THREADS"  # torch's variable for them
BEAT_S = 1.0
C_COMPILERS, CXX_COMPILERS = ("CC", "cc", "gcc", "clang"), ("CXX", "c++", "g++", "clang++")
"""What Triton and torch's compiler look for: a variable, or one of these programs."""


class Compiler:
    """Makes code of layers and keeps the time that this takes, since such a step says nothing about the pace."""

    def __init__(self, events: Events) -> None:
        self._events, self._began, self._latest_s, self._untold_s = events, 0.0, 0.0, 0.0
        self._count, self._whole_s, self._done = 0, 0.0, threading.Event()
        self._kinds: dict[tuple[type, Contexts | None], LayerKind] = {}
        self._said: list[Message] = []
        self.begun = 0  # codes that were begun, also those that came to nothing

    @property
    def is_at_work(self) -> bool:
        """Whether any layer still runs as compiled code."""
        return any(kind.is_compiled for kind in self._kinds.values())

    @property
    def untold(self) -> int:
        """How many sentences `take_said` has."""
        return len(self._said)

    def take_seconds(self) -> float:
        """What went into compiling since this was last asked."""
        seconds, self._untold_s = self._untold_s, 0.0
        return seconds

    def take_said(self) -> list[Message]:
        """What was said since this was last asked: rank 0 has written it, and that of other ranks nobody has read."""
        said, self._said = self._said, []
        return said

    def compile(self, model: nn.Module, how: Checkpointing, device: torch.device) -> int:
        """Have every layer compiled at its first run. The number of layers that recompute within their code."""
        dynamo: Any = torch._dynamo
        allow_variants(dynamo.config)
        setattr(import_module("torch._functorch.config"), EAGER_BACKWARD, True)
        if hasattr(dynamo, "callback"):
            dynamo.callback.on_compile_start(lambda *_: self._begin())
            dynamo.callback.on_compile_end(lambda *_: self._end())
        # Torch's advice to programmers: on operations in place under a checkpoint, which these layers have not, and on
        # gradients that its own tracing asks for. An error is one sentence of ours.
        for name in ("torch._dynamo", "torch._inductor", "torch._higher_order_ops"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        store = HostStore(device, self.warn) if how.offload else None
        within, layers, kinds = 0, number_layers(model), self._kinds
        layer: Any
        for index, layer in layers:
            contexts = inside(layer, index, how)
            is_chosen = how.layers is None or index < how.layers  # the others recompute elementwise work at most
            within += is_chosen and contexts is not None
            key = type(layer), contexts
            if key not in kinds:
                kinds[key] = LayerKind(type(layer).__name__, contexts, self)
            layer.forward = partial(kinds[key].run, layer)
            if store is not None:
                sends = is_chosen and index < len(layers) - 1
                layer.forward = partial(store.run, kinds[key].run, sends, index, layer)
        return within

    def report_code(self) -> None:
        """The code that was begun last has run."""
        self._count, self._whole_s = self._count + 1, self._whole_s + self._latest_s
        self._events.report(Message("train.layers-compiled", number=self._count, seconds=self._whole_s), 1, 1)

    def warn(self, text: Message) -> None:
        self._said.append(text)
        self._events.write("warning", text=text)

    def _begin(self) -> None:
        self.begun, self._began, self._done = self.begun + 1, time.monotonic(), threading.Event()
        told = {"number": self._count + 1, "seconds": round(self._whole_s)}
        self._events.doing(Message("train.compiling-layers" if self._count else "train.compiling-first", **told))
        threading.Thread(target=self._beat, args=(self._done,), daemon=True).start()

    def _end(self) -> None:
        self._done.set()
        self._latest_s = time.monotonic() - self._began
        self._untold_s += self._latest_s

    def _beat(self, done: threading.Event) -> None:
        """A variant in the middle of a run may take longer than a step is given. A compiler that never ends is found
        all the same: it is given what a first step is."""
        until = time.monotonic() + START_S
        while not done.wait(BEAT_S) and time.monotonic() < until:
            self._events.heartbeat.beat()


def allow_variants(config: Any) -> None:
    """Have torch keep them all, by the name that its release has for the limit."""
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, name, max(MOST_VARIANTS, getattr(config, name)))


def find_obstacle(levers: Levers, place: Place) -> Message | None:
    """Why nothing can be compiled by this engine or on this machine, as far as that can be told beforehand."""
    if levers.stage == 3:
        return Message("train.zero3-in-layers")
    try:
        frames: Any = import_module("torch._dynamo.eval_frame")
        if hasattr(frames, "check_if_dynamo_supported"):
            frames.check_if_dynamo_supported()
        functorch: Any = import_module("torch._functorch.config")
    except Exception as error:  # a torch that was built without it, a Python that is too new for it
        return Message("train.no-dynamo", why=_say_why(error))
    if not hasattr(functorch, EAGER_BACKWARD):
        return Message("train.lazy-backward")
    if BACKEND != "inductor":
        return None
    if place.on_gpu and not is_installed("triton"):
        return Message("train.no-triton")
    environment = inherited({})
    variable, *programs = C_COMPILERS if place.on_gpu else CXX_COMPILERS
    if not environment.get(variable) and not any(map(shutil.which, programs)):
        return Message("train.no-c-compiler", language="C" if place.on_gpu else "C++")
    return None


def keep_code(cache: Path, place: Place, ranks_here: int) -> Message | None:
    """Tell the compiler where its code lies, so that the next start need not make it again; what to say where it does
    not lie there. Each torch, card and release of ours has a folder: what recomputes is known to torch by a name alone.
    Torch unpickles what it finds: a folder in which others can write is none for it, nor is its own, which lies where
    anybody may have made it. So code that cannot be kept lies in a folder of this process alone."""
    if not is_set_by_user(PROCESSES):
        processes = max(1, min(MOST_PROCESSES, cores() // ranks_here))
        inductor: Any = import_module("torch._inductor.config")
        set_variable(PROCESSES, str(processes))
        if hasattr(inductor, "compile_threads"):  # it has read the variable: libraries load it that compile nothing
            inductor.compile_threads = processes
    if is_set_by_user(CODE_FOLDER):
        return None
    names = ["torch", torch.__version__, torch.cuda.get_device_name(place.device) if place.on_gpu else "cpu"]
    with suppress(metadata.PackageNotFoundError):
        names.append(metadata.version("tightfit"))
    folder = cache / COMPILED / re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(names))
    if (why := _find_fault(folder)) is None:
        _put_code_in(folder)
        return None
    private = tempfile.TemporaryDirectory(prefix="tightfit-", ignore_cleanup_errors=True)
    do_before_leaving(private.cleanup)
    _put_code_in(Path(private.name))
    return Message("train.code-not-kept", folder=folder, why=why)


def _find_fault(folder: Path) -> Said | None:
    """Why no code can lie there; the folder is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = folder.stat()
        if seen.st_uid != os.geteuid() or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Message("train.others-write-there")
        if room(folder) < ROOM_BYTES:
            return Message("train.no-room-there")
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return say_why(error)


def _put_code_in(folder: Path) -> None:
    set_variable(CODE_FOLDER, str(folder))
    # C++ kernels share headers that torch compiles beforehand, always in the folder that it would choose itself.
    code: Any = import_module("torch._inductor.codecache")
    headers = folder / "precompiled_headers"
    for name, path in {"_HEADER_DIR": headers, "_HEADER_LOCK_DIR": headers / "locks"}.items():
        if hasattr(code, name):
            setattr(code, name, str(path))


def fix_width(longest: int, sequence: int) -> int:
    """The length to which rows are padded whose longest has so many tokens: that of full rows or a half, a quarter …
    of it."""
    halves = (-(-(sequence >> times) // MULTIPLE) * MULTIPLE for times in range(HALVINGS, 0, -1))
    return next((width for width in halves if longest <= width < sequence), max(longest, sequence))


class LayerKind:
    """The layers of one class that recompute alike. Compiled until that fails once."""

    def __init__(self, name: str, contexts: Contexts | None, compiler: Compiler) -> None:
        self._name, self._compiler, self._has_run = name, compiler, False
        self._plain: Callable[..., Any] = _run if contexts is None else partial(_run_again, contexts)
        self._chosen: Callable[..., Any] = torch.compile(self._plain, dynamic=False, fullgraph=True, backend=BACKEND)

    @property
    def is_compiled(self) -> bool:
        return self._chosen is not self._plain

    def run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begun = self._compiler.begun
        try:
            made = self._chosen(layer, args, kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, torch.OutOfMemoryError):  # also of a kernel that was tried while compiling
                    raise cause from None
                cause = getattr(cause, "inner_exception", None) or cause.__cause__
            # Code that has never run may be at fault itself. If the layer is, it fails once more.
            is_new = not self._has_run or self._compiler.begun > begun
            if not self.is_compiled or not (is_new or is_from_compiler(error)):
                raise
            self._chosen, why = self._plain, _say_why(error)
        else:
            self._has_run = True
            if self._compiler.begun > begun:
                self._compiler.report_code()
            return made
        self._compiler.warn(Message("train.layer-not-compiled", kind=self._name, why=why))
        return self._plain(layer, args, kwargs)


def _run(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # By the class: `layer.forward` is what calls this.
    return type(layer).forward(layer, *args, **kwargs)


def _run_again(contexts: Contexts, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same, of which something is run once more in the backward pass."""
    if not torch.is_grad_enabled():
        return _run(layer, args, kwargs)
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def is_from_compiler(error: BaseException) -> bool:
    """Whether it was raised while code was made, and not by the code."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException) or type(error).__name__ in LIMIT_ERRORS


def _say_why(error: BaseException) -> Said:
    """What failed, in the compiler's own words: the first line of what it says of itself, without its advice."""
    if type(error).__name__ in LIMIT_ERRORS:
        return Message("train.too-many-variants")
    inner = getattr(error, "inner_exception", None) or error
    lines = (line.strip() for line in str(inner).splitlines())
    said = next((line for line in lines if line), "")
    return f"{type(inner).__name__}: {said}".rstrip(".: ")
