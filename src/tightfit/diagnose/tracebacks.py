"""Tracebacks, put together again: of several processes at once, boxed by rich, drawn by IPython, chained.

Lines that carry a process's mark are kept apart by it. Where nothing tells processes apart, the frames of those that
failed together lie in one heap, and each exception line takes from it: the frames are then the right ones only in
kind, which is enough to know where in a training step it happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tightfit.diagnose.lines import LogMessage
from tightfit.messages import Message
from tightfit.types import PhaseName

HEADER = re.compile(r"\bTraceback \(most recent call last\):?(?: \(RANK \d+\))?[\s:│|─━═╮┓┐+-]*$")
"""Other runtimes spell theirs otherwise, and end it otherwise. It ends its line: one with more behind it is quoted."""
_MOST_FRAMES = 400
_MOST_NOISE = 80  # lines of others between the frames of a traceback before it is given up
_EXCEPTION = re.compile(r"^(?:\| *)?(?P<name>(?:[A-Za-z_][\w<>]*\.)*[A-Za-z_]\w*)(?:: (?P<text>.*)|:|)$")
_NAMES = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Empty|Full|Group|Fault|Abort|Stop\w*)\w*$"
)
_FRAME = re.compile(r"^(?:\s|[|│╭╰❱─]|File |Cell In|-+> ?\d|\d+ |\^|~|\.\.\.|<ipython|Input In)")
_IPYTHON = re.compile(r"^(?P<name>[A-Za-z_]\w*(?:Error|Exception|Interrupt))\s{2,}Traceback \(most recent call last\)")
_CHAINED = re.compile(
    r"^\s*(?:During handling of the above exception|The above exception was the direct cause|Caused by)", re.IGNORECASE
)
_HARMLESS = re.compile(
    r"^\s*(?:Exception ignored (?:in|while|on)|--- Logging error ---|Error in sys\.excepthook|"
    r"Error in atexit|Task exception was never retrieved|Future exception was never retrieved)",
    re.IGNORECASE,
)

_PLACE = re.compile(r'^\s*File "[^"]+", line \d+, in \S')
_THREAD = re.compile(r"^\s*Exception in thread\b")


@dataclass(slots=True)
class Traceback:
    """One exception that somebody printed."""

    opened: LogMessage
    frames: list[tuple[int, str]] = field(default_factory=list)  # line numbers and lines
    exception: LogMessage | None = None
    name: str = ""
    is_aside: bool = False  # printed by something that goes on: a destructor, the logging
    in_thread: bool = False  # of a thread beside the program, which may go on without it
    chained: bool = False  # another one follows that was raised while this was handled
    follows: bool = False  # it is the one that follows
    headless: bool = False  # its beginning is not in the log: only what stands right under its frames ends it
    indent: int = 1  # spaces before all of its lines, as in torchrun's summary; some loggers put one there in any case

    def __post_init__(self) -> None:
        self.indent = max(1, len(self.opened.text) - len(self.opened.head))

    @property
    def place(self) -> str:
        return "\n".join(text for _, text in self.frames)


@dataclass(slots=True)
class _Stream:
    open: list[Traceback] = field(default_factory=list)
    frames: list[tuple[int, str]] = field(default_factory=list)
    noise: int = 0
    last: Traceback | None = None
    since_last: int = 99
    aside: bool = False  # an aside was announced
    thread: bool = False  # likewise a thread's end


class Assembler:
    """Takes lines, gives tracebacks when they are whole."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int | None], _Stream] = {}
        self.is_open = False  # some traceback is not whole yet

    def unfinished(self) -> Iterator[Traceback]:
        for stream in self._streams.values():
            for begun in stream.open:
                begun.frames = list(stream.frames)
                if begun.frames and not begun.headless:
                    yield begun

    def announced(self, message: LogMessage) -> None:
        """The line before a traceback: it may say that it is an aside."""
        stream = self._stream(message)
        stream.aside = stream.aside or bool(_HARMLESS.match(message.text))
        stream.thread = bool(_THREAD.match(message.text))

    def begun_before(self, message: LogMessage) -> None:
        """The log begins inside a traceback, as one that was cut off does: this is the first of its frames."""
        stream = self._stream(message)
        if _PLACE.match(message.text) and not stream.open:
            stream.open.append(Traceback(opened=message, headless=True))
            stream.frames = []
            self.is_open = True

    def _stream(self, message: LogMessage) -> _Stream:
        name = message.stream, message.rank if message.stream else None
        if name not in self._streams:
            self._streams[name] = _Stream()
        return self._streams[name]

    def take(self, message: LogMessage) -> Traceback | None:
        """One line; what it completes."""
        stream = self._stream(message)
        text = message.text
        stream.since_last += 1
        begins = "Traceback" in text and HEADER.search(text) is not None
        if begins:
            lower, last = text.lower(), stream.last
            inner = "original traceback" in lower or "(rank " in lower  # of a data loading worker, of another rank
            inner = inner or (last is not None and last.name.endswith("ExceptionGroup"))
            chained = last is not None and (last.chained or inner) and stream.since_last < 12
            named = _IPYTHON.match(text)
            begun = Traceback(opened=message, is_aside=stream.aside, in_thread=stream.thread, follows=chained)
            begun.name = named["name"] if named else ""
            stream.aside = stream.thread = False
            stream.open.append(begun)
            stream.noise = 0
            if len(stream.open) == 1:
                stream.frames = []
        elif _HARMLESS.match(text):
            stream.aside = True
        elif _CHAINED.match(text) and stream.last is not None:
            stream.last.chained = True
        if begins:
            self.is_open = True
            return None
        if not stream.open:
            return None
        whole = self._inside(stream, message)
        if not stream.open:
            self.is_open = any(each.open for each in self._streams.values())
        return whole

    def _inside(self, stream: _Stream, message: LogMessage) -> Traceback | None:
        text = message.text
        head = text.lstrip()
        is_deep = len(text) - len(head) > stream.open[0].indent
        found = None if is_deep else _EXCEPTION.match(head)
        is_exception = False
        if found is not None and stream.frames:
            # `KeyError: 'x'`, `torch.cuda.OutOfMemoryError: …`, `queue.Empty`; not `note: …` and not a word alone.
            name, last = found["name"], found["name"].rpartition(".")[2]
            is_named = bool(_NAMES.search(last))
            is_alike = last[:1].isupper() and ("." in name or found["text"] is not None)
            is_exception = is_named or (is_alike and not stream.open[0].headless)
        if not is_exception and (_FRAME.match(text) or not text):
            if text:
                stream.frames.append((message.number, text.strip()))
            if len(stream.frames) > _MOST_FRAMES:
                del stream.frames[_MOST_FRAMES // 2]
            return None
        if found is not None and is_exception:
            done = stream.open.pop(0)
            done.exception = message
            done.name = found["name"].rpartition(".")[2]
            done.frames = list(stream.frames)
            if not stream.open:
                stream.frames = []
            stream.last, stream.since_last, stream.noise = done, 0, 0
            return done
        stream.noise += 1
        if stream.noise > _MOST_NOISE or stream.open[0].headless:
            stream.open.clear()
        return None


# --- in which phase of the training it was raised ------------------------------------------------

PLACES: Mapping[PhaseName, Message] = {
    "init": Message("diagnose.at-init"),
    "forward": Message("diagnose.at-forward"),
    "loss": Message("diagnose.at-loss"),
    "backward": Message("diagnose.at-backward"),
    "step": Message("diagnose.at-step"),
    "eval": Message("diagnose.at-eval"),
    "save": Message("diagnose.at-save"),
}
"""As the end of a sentence."""
_LOSS = re.compile(
    r"cross_entropy|nll_loss|log_softmax|loss_fct|ForCausalLMLoss|self\.loss_function|logits\.float|logits\.to\(torch\.float|"
    r"loss_utils|selective_log_softmax|compute_logprobs|get_batch_log_?ps|lm_head\(|= logits"
)
_OUTER: tuple[tuple[PhaseName, re.Pattern[str]], ...] = (
    ("save", re.compile(
        r"_save_checkpoint|save_checkpoint|save_pretrained|in save_model|save_16bit|_zero3_consolidated|torch\.save\(|"
        r"in _save\b|save_state|save_adapter|get_model_state_dict|full_state_dict|in save\b")),
    ("eval", re.compile(
        r"evaluation_loop|prediction_loop|in evaluate\b|prediction_step|in validate\b|eval_step|nested_concat|"
        r"gather_for_metrics|in predict\b|compute_metrics|_evaluate\(|validation_step")),
    ("step", re.compile(
        r"engine\.step\(|optimizer\.step\(|_take_model_step|in step\b|/optim/\w+\.py|_optimizer_step|unscale_|"
        r"clip_grad_norm|scaler\.step|optim\.step\(")),
    ("backward", re.compile(r"\.backward\(|in backward\b|run_backward")),
)  # fmt: skip
_INIT = re.compile(
    r"from_pretrained|load_model|deepspeed\.initialize|_prepare_deepspeed|in prepare\b|_wrap_model|in initialize\b|"
    r"\.to\((?:device|[\"']cuda|self\.device|rank|local_rank|args\.device)|\.cuda\(|get_peft_model|"
    r"prepare_model_for_kbit|load_checkpoint|_load_optimizer|_load_from_checkpoint|load_state_dict|in _apply\b|"
    r"_configure_\w*optimizer|DistributedDataParallel\(|fully_shard\("
)
_TRAINING = re.compile(
    r"training_step|compute_loss|train_step|in train_one|in forward\b|_call_impl|model\(\*\*|forward\("
)


def phase_of(frames: list[str]) -> PhaseName | None:
    """None: the frames do not tell."""
    if not frames:
        return None
    text = "\n".join(frames)
    for phase, pattern in _OUTER:
        if pattern.search(text):
            # No optimizer computes a loss: people call the function that trains on a batch `step`, too.
            return "loss" if phase == "step" and _LOSS.search("\n".join(frames[-2:])) else phase
    if _LOSS.search("\n".join(frames[-8:])):
        return "loss"
    if _INIT.search(text) and not re.search(r"training_step|compute_loss|train_step", text):
        return "init"
    return "forward" if _TRAINING.search(text) else None
