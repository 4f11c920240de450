"""What the verbs share: a parser that answers in one sentence, and the flags of the levers.

The flags are made from the tables in `inputs/flags.py`, so that the help and the check cannot differ.
None has a default here: what was not said stays unsaid until `levers_from_flags`.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from tightfit.inputs.flags import LEAST, SHARES, WORDS, spelt
from tightfit.inputs.spelling import nearest
from tightfit.types import ConfigError

HELP = {
    "method": "train every weight, adapters, or adapters on a 4-bit model (full)",
    "engine": "how the training is spread over the GPUs (zero0: unsharded)",
    "seq": "tokens in a sequence (2048)",
    "micro_batch": "sequences in one forward pass on one GPU (1)",
    "accum": "forward passes before a step (1)",
    "precision": "the number format of the computation (bf16; fp16 on cards without it)",
    "offload_optimizer": "where the optimizer's states live, if not on the GPU (none)",
    "offload_param": "where the weights live between uses, if not on the GPU (none)",
    "checkpointing": "which layers keep no activations and compute them again (full)",
    "loss": "fused: the logits are never whole in memory (plain)",
    "attention": "the attention kernel (sdpa)",
    "optimizer": "the optimizer (adamw, with fp32 states)",
    "lora_rank": "rank of the adapters (8)",
    "lora_targets": "layers that get an adapter (all linear layers but the head)",
    "adapter_dtype": "number format of the adapters (bf16)",
    "lora_dropout": "share of the adapters' inputs that is dropped (0)",
    "scan": "the selective scan of Mamba models (official)",
    "reduce_bucket": "DeepSpeed's reduce_bucket_size, in elements",
    "allgather_bucket": "DeepSpeed's allgather_bucket_size, in elements",
    "prefetch_bucket": "DeepSpeed's stage3_prefetch_bucket_size, in elements",
    "persistence_threshold": "DeepSpeed's stage3_param_persistence_threshold, in elements",
    "max_live_parameters": "DeepSpeed's stage3_max_live_parameters, in elements",
    "max_reuse_distance": "DeepSpeed's stage3_max_reuse_distance, in elements",
    "overlap_comm": "reduce gradients beside the backward pass, with a second bucket (on at stage 3 only)",
    "deepspeed_version": "the DeepSpeed whose behaviour is priced",
    "frozen_layers": "the lowest N layers and the embedding do not train (0)",
    "trains": "what trains: everything, the embeddings alone, or all but the embeddings (all)",
    "dataloader_workers": "data loading processes of each rank (0)",
}
"""What each flag means, and in brackets its default."""

METAVARS = {
    "checkpointing": "none|full|full+offload|layers:K",
    "lora_targets": "all|a,b,c",
    "deepspeed_version": "V",
}

GROUPS = {
    "the training": ("method", "seq", "micro_batch", "accum", "precision", "optimizer", "frozen_layers", "trains"),
    "adapters": ("lora_rank", "lora_targets", "adapter_dtype", "lora_dropout"),
    "what saves memory": ("engine", "offload_optimizer", "offload_param", "checkpointing", "loss", "attention", "scan"),
    "DeepSpeed's buffers": (
        "reduce_bucket",
        "allgather_bucket",
        "prefetch_bucket",
        "persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "overlap_comm",
        "deepspeed_version",
    ),
    "the host": ("dataloader_workers",),
}


OTHER_NAMES = {
    "batch-size": "micro_batch",
    "nproc-per-node": "world",
    "num-gpus": "world",
    "quantization-bit": "method",
    "stage": "engine",
    "zero-stage": "engine",
}
"""What other programs call our flags, where the spelling alone would not show it."""


ALIASES = {
    "preset": "model",
    "load_checkpoint": "resume",
    "output_dir": "output",
    "max_seq_length": "seq",
    "ablation_config": "ablation",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "num_train_epochs": "epochs",
    "cutoff_len": "seq",
    "max_length": "seq",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accum",
    "lora_r": "lora_rank",
    "lora_target": "lora_targets",
    "lora_target_modules": "lora_targets",
    "dataloader_num_workers": "dataloader_workers",
    "save_total_limit": "keep_last",
}
"""Names that people know from other training scripts, and what they are here."""

CONFIG = "config_file"
"""Where `--config` is kept until it becomes the file."""

CHANGE = {"2": "something that you have to change; one sentence says what"}
"""How every verb ends where the user has to do something."""
ANSWERED = {"0": "answered", **CHANGE}
FITS_OR_NOT = {"0": "answered, whether it fits or not", **CHANGE}


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as one sentence and the nearest right spelling of a flag."""

    def __init__(self, verb: str, description: str, example: str, usage: str) -> None:
        super().__init__(
            prog=f"tightfit {verb}",
            usage=f"tightfit {verb} {usage}",
            description=textwrap.fill(description, 79),
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def ends_with(self, codes: Mapping[str, str], writes: str | None = None) -> Parser:
        """Itself, with its exit codes and what it writes at the end of its help, before the example."""
        wide = max(map(len, codes))
        lines = [
            textwrap.fill(meaning, 79, initial_indent=f"  {code:<{wide}}  ", subsequent_indent=" " * (wide + 4))
            for code, meaning in codes.items()
        ]
        text = "\n".join(["exit codes:", *lines])
        if writes is not None:
            written = textwrap.fill(writes, 79, initial_indent="  ", subsequent_indent="  ")
            text = f"writes:\n{written}\n\n{text}"
        self.epilog = f"{text}\n\n{self.epilog}"
        return self

    def add_file(self, metavar: str, what: str) -> None:
        """The file that a question starts from, with or without `--config` before it."""
        self.add_argument("file", nargs="?", metavar=metavar, help=what)
        self.add_argument(
            "--config", dest=CONFIG, metavar=metavar, help="the same file, as other training scripts name it"
        )

    def knows_as(self, names: Mapping[str, str]) -> None:
        """Other names for flags that it has, understood and not shown."""
        known = {action.dest: action for action in self._actions}
        for other, ours in names.items():
            if ours in known and spelt(other) not in self._option_string_actions:
                self.add_argument(spelt(other), dest=ours, type=known[ours].type or str, help=argparse.SUPPRESS)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or say which flag was meant. `--micro_batch` is the same as `--micro-batch`."""
        namespace, unknown = self.parse_known_args([_dashed(word) for word in argv])
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                known = [name for name in self._option_string_actions if name.startswith("--")]
                raise ConfigError(f"{self.prog} has no flag {flag}{_meant(flag, known, self.prog)}")
        if unknown:
            raise ConfigError(f"{self.prog} does not know what to do with {unknown[0]!r}; see {self.prog} --help")
        if hasattr(namespace, CONFIG):
            if hasattr(namespace, "file"):
                raise ConfigError(f"{namespace.file} and --config both name the file to start from: leave one out")
            namespace.file = getattr(namespace, CONFIG)
            delattr(namespace, CONFIG)
        return namespace


def add_lever_flags(parser: argparse.ArgumentParser, only: Iterable[str] | None = None) -> None:
    """Every flag of the levers, or those named."""
    wanted = set(HELP) if only is None else set(only)
    for title, flags in GROUPS.items():
        chosen = [flag for flag in flags if flag in wanted]
        if not chosen:
            continue
        group = parser.add_argument_group(title)
        for flag in chosen:
            if flag in LEAST:
                group.add_argument(spelt(flag), metavar="N", type=whole_number(flag), help=HELP[flag])
            elif flag in SHARES:
                group.add_argument(spelt(flag), metavar="SHARE", type=share(flag), help=HELP[flag])
            else:
                metavar = METAVARS.get(flag) or "|".join(WORDS[flag])
                group.add_argument(spelt(flag), metavar=metavar, help=HELP[flag])
        if "optimizer" in chosen and only is None:
            group.add_argument(
                "--no-master-weights",
                dest="master_weights",
                action="store_false",
                help="pure 16-bit training, without fp32 copies of the weights",
            )


def whole_number(flag: str) -> Callable[[str], int]:
    """A reader of `2048`, `500_000_000` and, as DeepSpeed's own files have it, `5e8`."""

    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,18}", text.replace("_", "")):
            return int(text.replace("_", ""))
        if re.fullmatch(r"\d+(\.\d+)?[eE]\+?1?\d", text) and float(text).is_integer():
            return int(float(text))
        raise ConfigError(f"{spelt(flag)} takes a whole number, not {text!r}")

    return read


def share(flag: str) -> Callable[[str], float]:
    """A reader of `0.05`."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{spelt(flag)} takes a share such as 0.05, not {text!r}") from None

    return read


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _meant(flag: str, known: list[str], prog: str) -> str:
    other = OTHER_NAMES.get(flag.lstrip("-"))
    close = spelt(other) if other and spelt(other) in known else nearest(flag, known)
    return f": did you mean {close}?" if close else f"; see {prog} --help"
