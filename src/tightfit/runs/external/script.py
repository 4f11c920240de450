"""What a training script says about itself: read from its text, never by running it.

Two questions decide whether a script may be started again in another way. Do the flags and the file that it is given
decide its batch, or does it set the batch itself? And can it be told to go on from a checkpoint? A script that calls
plain `trainer.train()` takes `--resume_from_checkpoint` like any other field of TrainingArguments, and ignores it.
Where the text leaves a doubt, the answer is the careful one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
RESUME = "resume_from_checkpoint"
Resumes = Literal["told", "by itself", "none"]  # the checkpoint is named to it; it finds it itself; it cannot go on

_PARSERS = {"HfArgumentParser", "H4ArgumentParser", "TrlParser"}
_FILE_READERS = {"TrlParser", "parse_args_and_config", "parse_yaml_file", "parse_json_file", "parse_dict"}
_ARGUMENTS = re.compile(
    r"\w*TrainingArguments|(SFT|DPO|OnlineDPO|GRPO|KTO|ORPO|CPO|BCO|RLOO|PPO|XPO|GKD|PRM|Reward|NashMD)Config"
)
_PREFERENCES = re.compile(r"(OnlineDPO|DPO|GRPO|KTO|ORPO|CPO|BCO|RLOO|PPO|XPO|GKD|PRM|Reward|NashMD)Trainer")
_ACROSS_THE_BATCH = re.compile(r"(KTO|BCO|PPO|SentenceTransformer|SparseEncoder|CrossEncoder)\w*Trainer")
"""Their loss compares the samples of one micro batch: a smaller one is another training."""
_GENERATES = {"GRPOTrainer", "RLOOTrainer"}
_DEEPSPEEDS_BATCH = {"training_data", "train_micro_batch_size_per_gpu"}


@dataclass(frozen=True)
class TrainingScript:
    """A script's text; empty where it cannot be read."""

    text: str = ""

    @cached_property
    def takes_arguments(self) -> bool:
        """Whether its command line goes through Hugging Face's parser, so that every field is a flag."""
        return bool(self._names & _PARSERS)

    @cached_property
    def reads_argument_files(self) -> bool:
        """Whether that parser also reads them from a file that a flag names, as TRL's does from `--config`."""
        return self.takes_arguments and bool(self._names & _FILE_READERS)

    @cached_property
    def is_hugging_face(self) -> bool:
        named = any(map(_ARGUMENTS.fullmatch, self._names)) or {"transformers", "Trainer"} <= self._names
        return self.takes_arguments or named

    @cached_property
    def is_trl(self) -> bool:
        return "trl" in self._names

    @cached_property
    def preference_trainer(self) -> str | None:
        """The trainer whose memory is not that of plain training: pairs, a second model, texts that it generates."""
        return next(filter(_PREFERENCES.fullmatch, sorted(self._names)), None)

    @cached_property
    def across_the_batch(self) -> str | None:
        """The trainer whose loss depends on what stands together in a micro batch."""
        return next(filter(_ACROSS_THE_BATCH.fullmatch, sorted(self._names)), None)

    @cached_property
    def generates(self) -> bool:
        return bool(self._names & _GENERATES)

    @cached_property
    def starts_processes(self) -> bool:
        """Whether it starts its own ranks, so that plain `python` is right."""
        return bool(self._names & {"spawn", "start_processes", "notebook_launcher", "mp_spawn", "Popen"})

    @cached_property
    def uses_deepspeeds_batch(self) -> bool:
        """Whether the micro batch of the DeepSpeed file is the one that it trains with."""
        return bool(self._names & _DEEPSPEEDS_BATCH)

    def mentions(self, words: str) -> bool:
        return words in self.text

    @cached_property
    def has_own_loss(self) -> bool:
        if self._tree is None:
            return "compute_loss" in self.text
        return any(
            (isinstance(node, ast.FunctionDef) and node.name == "compute_loss")
            or (isinstance(node, ast.keyword) and node.arg == "compute_loss_func")
            for node in ast.walk(self._tree)
        )

    def sets(self, *names: str) -> str | None:
        """The first of these settings that the script decides itself, whatever it was started with."""
        if self._tree is None:
            return next((name for name in names if name in self.text), None)
        # but for the setting itself, as it came: `per_device_train_batch_size=args.per_device_train_batch_size`
        given = _assignments(self._tree)
        written = {name for name, value in given if value is None or _last_name(value) != name}
        return next((name for name in names if name in written), None)

    @cached_property
    def resumes(self) -> Resumes:
        if self._tree is None:
            return "none"
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        names = {_last_name(call.func) for call in calls}
        from_where = [found for call in calls if (found := _checkpoint_argument(call)) is not None]
        if any(isinstance(value, ast.Constant) and value.value is True for value in from_where):
            return "by itself"
        if "get_last_checkpoint" in names and (from_where or not self.calls_plain_train):
            return "by itself"
        can_be_told = bool(self._names & {RESUME, f"--{RESUME}"})
        if from_where:
            return "told" if can_be_told else "none"
        if self.calls_plain_train:
            return "none"
        if can_be_told:
            return "told"
        return "by itself" if names & {"load_checkpoint", "load_state"} else "none"

    @cached_property
    def calls_plain_train(self) -> bool:
        """`trainer.train()`, which begins at step 0 whatever is there."""
        if self._tree is None:
            return False
        return any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "train"
            and not node.args
            and not node.keywords
            and "trainer" in ast.unparse(node.func.value).lower()
            for node in ast.walk(self._tree)
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        """Every name in the code, and none that stands only in a comment."""
        if self._tree is None:
            return frozenset(re.findall(r"[A-Za-z_]\w*", self.text))
        return frozenset(name for node in ast.walk(self._tree) for name in _names_in(node))

    @cached_property
    def _tree(self) -> ast.Module | None:
        """None: it is not Python that we can read."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Every name that is given a value: by assignment, as a keyword, in a dictionary, as a field of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value
        elif isinstance(node, ast.Assign):
            yield from ((_last_name(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            yield _last_name(node.target), None if isinstance(node, ast.AugAssign) else node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        elif isinstance(node, ast.Call) and _last_name(node.func) == "setattr" and len(node.args) == 3:
            _, name, value = node.args
            yield str(name.value) if isinstance(name, ast.Constant) else "", value


def _names_in(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.keyword):
        return (node.arg or "",)
    if isinstance(node, ast.alias):
        return tuple(node.name.split("."))
    if isinstance(node, ast.ImportFrom):
        return tuple((node.module or "").split("."))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)  # a key of a DeepSpeed config
    return ()


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else ""


def _checkpoint_argument(call: ast.Call) -> ast.expr | None:
    """What `X.train(…)` is told to go on from; `model.train(True)` is another matter."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "train":
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == RESUME), None)
    if named is not None:
        return None if isinstance(named, ast.Constant) and named.value in (None, False) else named
    first = call.args[0] if call.args else None
    return None if isinstance(first, ast.Constant) and not isinstance(first.value, str) else first
