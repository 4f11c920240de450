"""What a log says in passing: what the program was doing last, how far the training had come, and its settings.

A process that is killed says nothing. What it had announced before is then the only hint at why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from tightfit.diagnose.gate import alternatives, longest_run
from tightfit.job.known import KnownConfig

Doing = Literal[
    "loading", "mapping", "initialising", "training", "evaluating", "saving", "resuming", "converting", "compiling",
    "nvme",
]  # fmt: skip

_ANNOUNCED: dict[Doing, bytes] = {
    "loading": rb"loading checkpoint shards|loading weights|loading safetensors|materializing param|fetching \d+ files|"
    rb"loading (?:pipeline|pretrained|base|the )?\s?model(?! checkpoint)|from_pretrained|loading model shards",
    "mapping": rb"running tokenizer on|tokeniz(?:ing|e)\b[^\n]{0,60}\d+%|\bmap(?: \(num_proc=\d+\))?:\s|\bfilter:\s|"
    rb"generating \w+ split|converting format of dataset|packing (?:dataset|\w+ dataset)|grouping texts",
    "initialising": rb"deepspeed info: version|trainable params:|creating (?:fp16|bf16|torch\.\w+) zero|"
    rb"zero stage 3 optimizer|"
    rb"begin bf16_optimizer|reduce bucket size|deepspeedcpuadam|adam optimizer #\d|stage 3 initialize|"
    rb"using deepspeed optimizer|partition count|wrapping model|fsdp wrap",
    "training": rb"running training|loss['\"]?\s*[:=]\s*['\"]?[\d.]|starting training|"
    rb"training begin",
    "evaluating": rb"running (?:evaluation|prediction)|\bevaluat(?:ing|ion)\b|validation step",
    "saving": rb"saving (?:model )?checkpoint|saving model|\[torch\] saving|saving (?:optimizer|weights|state)|"
    rb"model weights saved|save_pretrained|gathering[^\n]{0,40}weights",
    "resuming": rb"resum(?:ing|e) (?:from|training)|loading (?:model|states?|optimizer)[^\n]{0,60}checkpoint-\d|"
    rb"restor(?:ing|ed) (?:from|states)|loading optimizer states?|continuing training from checkpoint|"
    rb"attempting to resume|loading deepspeed checkpoint|\[torch\] loading checkpoint|loading states from",
    "converting": rb"zero_to_fp32|ds_to_universal|processing zero checkpoint|detected checkpoint of type zero|"
    rb"parsing checkpoint created by deepspeed|reconstructed \w+ state dict|merg(?:ing|e)\b[^\n]{0,40}(?:adapter|lora)",
    "compiling": rb"building extension module|loading extension module|ninja: |jit compiling|torch_extensions",
    "nvme": rb"nvme|async_?io|swap_tensor|aio_handle|partitionedparam\w*swap",
}
_PHRASES = tuple((name, phrase) for name, text in _ANNOUNCED.items() for phrase in alternatives(text.decode()))
_RUNS = tuple(longest_run(phrase).encode() for _, phrase in _PHRASES)  # what each of them has to contain
_STEP = re.compile(
    rb"""(?ix)
      (?<!\w)(?:global_?step|step|steps|iteration|iter)\s*['\"]?\s*[:=]?\s*\[?(?P<step>\d{1,12})(?!\d*\.\d)
    | epoch\W{0,3}\[?\d+\]?\W{0,3}(?P<of>\d{1,12})\s*/\s*\d+
    """
)
_EPOCH = re.compile(rb"epoch['\"]?\s*[:=]?\s*['\"]?(\d+(?:\.\d+)?)")
_BAR = re.compile(
    rb"(?:^|\])(?P<label>[^\r\n|%\]]{0,80}?)\s*\d{1,3}%\|[^|\r\n]*\|\s*(?P<bar>\d{1,12})/(?P<of>\d{1,12})\s*\["
)
_NEAR = (1024, 8192)
_SHORT_BAR = 5  # a bar of fewer steps is rather one of files or shards
_LOSS = re.compile(
    rb"loss(?<![a-z]loss)['\"]?\s*(?:[:=]|\bis\b)?\s*['\"]?(?:tensor\()?(\d+(?:\.\d*)?(?:e[+-]?\d{1,3})?)"
)
_DONE = (
    rb"train_runtime['\"]", rb"\*\*\*\*\* train metrics", rb"training completed\. do not forget",
    rb"exits? successfully", rb"return code = 0\b", rb"job completed successfully", rb"trial \d+ finished with value",
)  # fmt: skip
"""Only a program that came to its end says this, or a search for settings that outlived one of its trainings."""
_SAYS_DONE = (
    rb"training (?:is )?(?:finished|completed?|done|success)", rb"finished training\b", rb"completed? training\b",
    rb"done training\b", rb"run finished(?<=\brun finished)", rb"exit(?:ed)? (?:with )?(?:code|status)[:\s=]*0\b",
    rb"all done(?<=\ball done)\b",
)  # fmt: skip
"""A script around it may say this in any case. All begin with plain letters, which are looked for quickly."""
_DONE_PATTERNS, _SAYS_DONE_PATTERNS = (
    tuple((longest_run(each.decode()).encode(), re.compile(each)) for each in every) for every in (_DONE, _SAYS_DONE)
)


@dataclass(frozen=True, slots=True)
class Signs:
    """What a text shows of a training that goes on."""

    steps: frozenset[bytes] = frozenset()  # numbers of steps, or epochs, that were made
    losses: int = 0  # lines with a loss that is a number
    finished: bool = False
    says_done: bool = False

    def __add__(self, other: Signs) -> Signs:
        finished, says_done = self.finished or other.finished, self.says_done or other.says_done
        return Signs(self.steps | other.steps, self.losses + other.losses, finished, says_done)

    @property
    def went_on(self) -> bool:
        """A rank that lost a neighbour may still print a step or two that were under way."""
        if self.finished or (self.says_done and self.losses):
            return True
        return len(self.steps) >= _ENOUGH or self.losses >= 4 * _ENOUGH


_ENOUGH = 3
_NOT_FINITE = re.compile(rb"(?<![a-z_])-?(?:nan|inf)(?![a-z_])")


def lines_of(data: bytes) -> list[bytes]:
    """The drawings of a progress bar are lines too."""
    return data.replace(b"\r", b"\n").split(b"\n")


def signs_in(data: bytes) -> Signs:
    """Look for lines that only a living training prints."""
    steps: set[bytes] = set()
    losses, data = 0, data.lower()
    for line in lines_of(data) if b"loss" in data or b"%|" in data else ():
        if losses >= 4 * _ENOUGH:  # more of them would say no more
            return Signs(frozenset(steps), losses)
        if b"%|" in line:
            steps.update(bar["bar"] for bar in _bars(line))
            continue
        loss = _LOSS.search(line) if b"loss" in line else None
        may_be_none = b"nan" in line or b"inf" in line
        if loss is None or (may_be_none and _NOT_FINITE.search(line)) or not float(loss[1]):
            continue
        losses += 1
        step, epoch = _STEP.search(line), _EPOCH.search(line) if b"epoch" in line else None
        if step or epoch:
            steps.add((step["step"] or step["of"]) if step else epoch[1] if epoch else b"")
    finished, says_done = (
        any([run in data and pattern.search(data) for run, pattern in every])
        for every in (_DONE_PATTERNS, _SAYS_DONE_PATTERNS)
    )
    return Signs(frozenset(steps), losses, finished, says_done)


def _bars(line: bytes) -> Iterator[re.Match[bytes]]:
    """The bars of a training: without a label, and of more than a handful of steps."""
    for bar in _BAR.finditer(line):
        if int(bar["of"]) >= _SHORT_BAR and not bar["label"].strip():
            yield bar


def last_doing(data: bytes) -> Doing | None:
    """The last thing that a text announces. It is mostly near the end, and looking for it takes a while."""
    data = data.lower()
    for part in (*(data[-near:] for near in _NEAR if near < len(data)), data):
        likely = [number for number, run in enumerate(_RUNS) if run in part]
        starts = [(match.start(), -number) for number in likely for match in _phrase(number).finditer(part)]
        if starts:
            return _PHRASES[-max(starts)[1]][0]
    return None


@cache
def _phrase(number: int) -> re.Pattern[bytes]:
    """One phrase alone: all of them in one expression take ten times as long."""
    return re.compile(_PHRASES[number][1].encode())


def steps_in(data: bytes) -> int | None:
    """How many training steps a text shows to have been made; None: it shows none."""
    unnumbered = 0  # lines after the last one that says its number
    for line in reversed(lines_of(data.lower())):
        if b"%|" in line:
            if numbers := [int(bar["bar"]) for bar in _bars(line)]:
                return max(numbers) + unnumbered
        elif b"loss" in line and _LOSS.search(line):
            step = _STEP.search(line)
            number = step and (step["step"] or step["of"])
            if number:
                return int(number) + unnumbered
            unnumbered += 1
    return unnumbered or None


_DEVICE = rb"['\"]?\s*[:=]\s*\{?\s*['\"]?device['\"]?\s*[:=]\s*['\"]?(cpu|nvme)"
_HYGON = (b"dtk", b"dcu", b"hygon", b"gfx")
_TABLE = {
    "stage": (
        (b"zero_optimization_stage", b"zero_optimization"),
        rb"zero_optimization_stage\W+(\d)\b|zero_optimization['\"]?\s*[:=]\s*\{\s*['\"]stage['\"]\s*:\s*([0-3])\b",
    ),
    "micro_batch": ((b"instantaneous",), rb"(?i)instantaneous batch size per device\s*=\s*(\d{1,9})\b"),
    "accumulation": ((b"accumulation",), rb"(?i)gradient accumulation steps\s*=\s*(\d{1,9})\b"),
    "vocabulary": ((b"vocab_size",), rb"['\"]?vocab_size['\"]?\s*[:=]\s*(\d{3,7})"),
    "world": ((b"world_size",), rb"world_size\W{1,12}(\d{1,5})\b"),
    "checkpointing": (
        (b"checkpointing", b"gradient_checkpointing"),
        rb"(?i)gradient checkpointing (enabled|is enabled)|gradient_checkpointing['\"]?\s*[:=]\s*(true)",
    ),
    "offload_optimizer": ((b"offload_optimizer",), rb"(?i)offload_optimizer" + _DEVICE),
    "offload_param": ((b"offload_param",), rb"(?i)offload_param" + _DEVICE),
    "precision": (
        (b"compute", b"_enabled"),
        rb"(?i)compute dtype: torch\.(bfloat16|float16)|(fp16|bfloat16|bf16)_enabled\W+true",
    ),
    "trainer": (
        (b"llamafactory", b"axolotl"),
        rb"[\\/](llamafactory|axolotl)[\\/]|\b(llamafactory|axolotl)(?:-cli|\.\w+)\b",
    ),
    "vendor": (
        (b"hip", b"rocm", b"rccl", b"miopen", *_HYGON, b"npu", b"torch_npu", b"hccl", b"ascend", b"cann"),
        rb"(?i)[./](dtk)[-\d/]|\b(dcu|hygon)\b|\b(gfx9(?:26|28|36))\b|\b(hip) (?:out of memory|error|gpus)|"
        rb"\b(rccl|miopen)\b|\+(rocm)\d|\b(npu)(?: out of memory| error| function|:\d)|\b(torch_npu)[/.\\]|\b(hccl)\b|"
        rb"\b(ascend)[ /]?(?:910|310|npu|cann|toolkit)|\b(cann) error\b",
    ),
    "method": ((b"trainable",), rb"(?i)(trainable)%: (?:[0-9]|[1-4][0-9])(?:\.\d+)?\b"),
}
_COMPILED = {name: (frozenset(words), re.compile(text)) for name, (words, text) in _TABLE.items()}
_MEANT: dict[str, object] = {
    "enabled": True, "is enabled": True, "true": True, "float16": "fp16", "bfloat16": "bf16", "trainable": "lora",
    "hip": "amd", "rccl": "amd", "miopen": "amd", "rocm": "amd", "dtk": "hygon", "dcu": "hygon",
    "gfx926": "hygon", "gfx928": "hygon", "gfx936": "hygon", "npu": "ascend", "torch_npu": "ascend", "hccl": "ascend",
    "cann": "ascend",
}  # fmt: skip


def look_for_settings(known: KnownConfig, data: bytes, words: set[bytes]) -> KnownConfig:
    """What is known, and what one piece of a log, whose words are these, adds to it. The first that is said counts; but
    Hygon's cards speak as AMD's until one of them is named."""
    for name, (wanted, pattern) in _COMPILED.items():
        before = getattr(known, name)
        may_be_hygon = before == "amd" and not words.isdisjoint(_HYGON)
        if wanted.isdisjoint(words) or (before is not None and not may_be_hygon):
            continue
        groups = [group for found in pattern.finditer(data) for group in found.groups() if group]
        texts = [group.decode("ascii", errors="replace").lower() for group in groups]
        told: list[Any] = [int(text) if text.isdigit() else _MEANT.get(text, text) for text in texts]
        if told:
            value: Any = "hygon" if "hygon" in told else told[0]
            known = replace(known, **{name: value})
    return known
