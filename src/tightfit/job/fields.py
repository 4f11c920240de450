"""The fields of a job: what each takes, and the one sentence for each that is wrong.

pydantic decides whether a tree of plain values is a `Job`. Its own messages are for programmers: they speak of
union branches and know nothing of files, flags or the right spelling. So every sentence is made here, from the
type of the field at which pydantic found fault, and names that field as the user wrote it: by its dotted path in
a file, as `--effective-batch` on a command line, or under the name that another form of file gave it.

Before pydantic looks, what can only mean one thing is put right: YAML reads `1e-4` as text, people write
`BF16` or `q_proj,v_proj`. Where that was a guess about a number, it is said.

The free levers are fields too (`levers.engine` …), though `Job` keeps them as a mapping: their words and ranges
stand on the fields of `Levers` already.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from tightfit.inputs.flags import LEVERS, checkpointing_from_word, words_of
from tightfit.inputs.spelling import LARGEST, as_number, listed, nearest, shown
from tightfit.job import Job
from tightfit.job.training import MARKS
from tightfit.types import ConfigError, Group, Lever

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FREE_LEVERS: Mapping[str, Lever] = {
    lever.flag: lever
    for group in sorted(get_args(Group), key=lambda group: group != "what saves memory")
    for lever in LEVERS.values()
    if lever.free and lever.group == group
}
"""What `levers` may pin, under the names of the `estimate` flags: what changes no result. What saves memory first."""

COSTLY = {name: lever.path for lever in LEVERS.values() if not lever.free for name in (lever.flag, lever.path)}
"""Levers that change the result, by either name, and the field of the job that each is."""

_FIELD_OF_LEVER = {flag: f"levers.{flag}" if lever.free else lever.path for flag, lever in LEVERS.items()}

OTHER_NAMES = {
    **{lever.path: _FIELD_OF_LEVER[flag] for flag, lever in LEVERS.items() if flag != lever.path},
    **{flag: field for flag, field in _FIELD_OF_LEVER.items() if not field.endswith(flag)},
    **{other: _FIELD_OF_LEVER[lever.flag] for lever in LEVERS.values() for other in lever.also},
    "ablation_config": "data.ablation",
    "batch_size": "effective_batch",
    "bf16": "precision",
    "checkpoint_dir": "saving.folder",
    "dataset": "data.path",
    "fp16": "precision",
    "gradient_checkpointing": "levers.checkpointing",
    "lora_alpha": "lora.alpha",
    "lr": "learning_rate",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip",
    "num_train_epochs": "epochs",
    "output_dir": "saving.folder",
    "rank": "lora.rank",
    "save_every": "saving.every",
    "save_steps": "saving.every_steps",
    "save_total_limit": "saving.keep_last",
    "scheduler": "schedule",
    "stage": "levers.engine",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "world": "hardware.gpus",
    "zero_stage": "levers.engine",
}
"""What other programs call our fields, where the spelling alone would not show it."""

EXAMPLES = {
    "model": "a name or a block of shape fields",
    "hardware.gpus": "a word such as 6x32GB",
    "hardware.host_ram": "a size such as 256GB",
    "hardware.nvme": "a size such as 2TB",
    "limits.gpu_memory": "a size such as 20GB",
    "limits.host_ram": "a size such as 200GB",
    "timeout": "a time such as 12h",
    "levers.deepspeed_version": "a version in quotes such as '0.16.4'",
}
"""Text that has a form of its own."""

Kind = Literal["integer", "number", "switch", "text", "words", "list", "fields", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What a field takes, as read from its type."""

    kind: Kind
    words: tuple[str, ...] = ()
    """The few words that are right; of a list: a word that may stand in its place."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    item: Takes | None = None
    """Of a list: what each of its items is."""
    nullable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobField:
    """One field of a job file."""

    name: str
    """Its dotted path."""
    takes: Takes
    default: object = None
    required: bool = False

    @property
    def phrase(self) -> str:
        """What it takes, to stand after `must be`."""
        return EXAMPLES.get(self.name) or _phrase(self.takes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a job was written, and how its sentences call a field."""

    file: str | None = None
    names: Mapping[str, str]
    """Dotted path → what the user wrote: a flag, or a field of another form of file."""
    kind: Literal["yaml", "json", "flags"] = "flags"

    def name(self, path: str) -> str:
        return self.names.get(path, path)

    def called(self, path: str) -> str:
        """The same, with the file that it stands in."""
        name = self.name(path)
        return f"{name} in {self.file}" if self.file and not name.startswith("--") else name


# --- the fields ---------------------------------------------------------------------------------


@cache
def job_fields() -> Mapping[str, JobField]:
    """Every field by its dotted path, blocks before what is in them."""
    levers = (JobField(name=f"levers.{name}", takes=_lever_takes(lever)) for name, lever in FREE_LEVERS.items())
    return {each.name: each for each in (*_fields_in(Job, ""), *levers)}


@cache
def meanings() -> Mapping[str, str]:
    """The sentence under each field of `Job` and its blocks, by dotted path."""
    return dict(_sentences_in(Job, ""))


def _fields_in(block: type, prefix: str) -> Iterator[JobField]:
    hints = get_type_hints(block, include_extras=True)
    for each in fields(block):
        takes = _takes(hints[each.name])
        yield JobField(name=prefix + each.name, takes=takes, default=default_of(each), required=_is_required(each))
        if takes.kind == "block":
            yield from _fields_in(hints[each.name], f"{prefix}{each.name}.")


def default_of(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return None if each.default is MISSING else each.default


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _sentences_in(block: type, prefix: str) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(block)
    body = ast.parse(inspect.getsource(block)).body[0]
    assert isinstance(body, ast.ClassDef)
    for line, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            name = line.target.id
            yield prefix + name, inspect.cleandoc(str(below.value.value))
            if is_dataclass(hints[name]):
                yield from _sentences_in(hints[name], f"{prefix}{name}.")


def _takes(hint: Any) -> Takes:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _within(_takes(inside[0]), hint.__metadata__)
    if origin in (Union, types.UnionType):
        parts = [_takes(part) for part in inside if part is not type(None)]
        words = tuple(word for part in parts[1:] for word in part.words)
        return replace(parts[0], words=parts[0].words + words, nullable=len(parts) < len(inside))
    if origin is Literal:
        return Takes(kind="words", words=inside)
    if origin is tuple:
        return Takes(kind="list", item=_takes(inside[0]))
    if is_dataclass(hint):
        return Takes(kind="block")
    plain: dict[Any, Kind] = {int: "integer", float: "number", bool: "switch", str: "text"}
    return Takes(kind=plain.get(hint, "fields"))


def _within(takes: Takes, bounds: tuple[object, ...]) -> Takes:
    found: dict[str, Any] = {}
    for bound in bounds:
        if isinstance(bound, Ge):
            found["least"] = bound.ge
        elif isinstance(bound, Gt):
            found["above"] = bound.gt
        elif isinstance(bound, Le):
            found["most"] = bound.le
        elif isinstance(bound, Lt):
            found["below"] = bound.lt
    return replace(takes, **found)


def _lever_takes(lever: Lever) -> Takes:
    if words := words_of(lever):
        return Takes(kind="words", words=words)
    return replace(_takes(lever.type), least=lever.least, most=lever.most)


def _phrase(takes: Takes) -> str:
    if takes.kind == "words":
        return listed(takes.words)
    if takes.kind == "list":
        assert takes.item is not None
        plural = {"integer": "whole numbers", "text": "names", "fields": "blocks of fields"}
        many = plural.get(takes.item.kind) or listed(takes.item.words)
        return listed([f"a list of {many}{_range(takes.item)}", *(f"`{word}`" for word in takes.words)])
    nouns: dict[Kind, str] = {
        "integer": "a whole number",
        "number": "a number",
        "switch": "true or false",
        "text": "text",
        "fields": "a block of fields",
        "block": "a block of fields",
    }
    return nouns[takes.kind] + _range(takes)


def _range(takes: Takes) -> str:
    if takes.least is not None and takes.below is not None:
        return f" from {takes.least:g} to below {takes.below:g}"
    if takes.least is not None and takes.most is not None:
        return f" from {takes.least:g} to {takes.most:.0f}"
    if takes.least is not None:
        return f" of at least {takes.least:g}"
    if takes.above is not None and takes.most is not None:
        return f" above {takes.above:g} and at most {takes.most:.0f}"
    return f" above {takes.above:g}" if takes.above is not None else ""


# --- from a tree to a job -----------------------------------------------------------------------


def job_from_tree(tree: Mapping[str, Any], source: Source) -> tuple[Job, tuple[str, ...]]:
    """The job that a tree of plain values means, and what had to be taken for something else."""
    said: list[str] = []
    mended = _mend_block(tree, "", source, said)
    for _, fault in _levers_faults(mended.get("levers"), source):
        raise fault
    job = _validated(mended)
    if not isinstance(job, Job):
        raise next(_faults(job, mended, source))[1]
    return job, tuple(said)


def faults_in_tree(tree: Mapping[str, Any], source: Source) -> tuple[Job | None, tuple[str, ...]]:
    """Every sentence that `job_from_tree` could raise, and the job that is left without those fields.

    There is no job where what is wrong cannot be left out: a model, or a whole block.
    """
    mended = _mend_block(tree, "", source, [])
    found = list(_levers_faults(mended.get("levers"), source))
    job = _validated(mended)
    if not isinstance(job, Job):
        found += _faults(job, mended, source)
    for path, _ in found:
        block, _, key = path.rpartition(".")
        inside = mended.get(block) if block else mended
        if isinstance(inside, dict):
            inside.pop(key, None)
    job = _validated(mended)
    return job if isinstance(job, Job) else None, tuple(str(fault) for _, fault in found)


def wrong(path: str, value: object, source: Source) -> ConfigError:
    """The error for a value that a field does not take."""
    takes = job_fields()[path].takes
    words = takes.item.words if takes.item is not None else takes.words
    if takes.kind == "list" and isinstance(value, list):
        strays = [each for each in value if words and each not in words]
        value = strays[0] if strays else value
    if isinstance(value, str) and value.strip() and words and takes.kind in ("words", "list"):
        close = nearest(value, words)
        tail = f"did you mean '{close}'?" if close else f"it takes {listed(words)}"
        return ConfigError(f"{source.called(path)} knows no {shown(value)}; {tail}")
    if isinstance(value, int | float) and takes.most is not None and value > takes.most:
        return ConfigError(f"{source.called(path)} must be at most {takes.most:.0f}, not {shown(value)}")
    phrase = EXAMPLES.get(path) or _phrase(replace(takes, most=None))  # the end that it is not beyond says nothing
    return ConfigError(f"{source.called(path)} must be {phrase}, not {shown(value)}{_hint(path, value, source)}")


def _hint(path: str, value: object, source: Source) -> str:
    """Why YAML made something else of it, or what to do about a null."""
    field = job_fields()[path]
    if value is None:
        return "" if field.required else ": leave it out for the default"
    if isinstance(value, bool) and field.takes.kind in ("text", "words") and source.kind == "yaml":
        return ": YAML reads yes, no, on and off so, put it in quotes"
    if isinstance(value, str) and field.takes.kind == "switch" and value.lower() in ("true", "false"):
        return ": write it without quotes"
    return ""


def _mend_block(values: Mapping[str, Any], prefix: str, source: Source, said: list[str]) -> dict[str, Any]:
    mended: dict[str, Any] = {}
    for key, value in values.items():
        field = job_fields().get(prefix + key) if "." not in key else None
        if field is None:
            mended[key] = value
        elif field.takes.kind == "block" or field.name == "levers":
            if value is not None:  # a block whose lines are all commented out
                inside = isinstance(value, Mapping)
                mended[key] = _mend_block(value, f"{field.name}.", source, said) if inside else value
        else:
            mended[key] = _mend(value, field.takes)
            if isinstance(value, str) and isinstance(mended[key], int | float) and source.kind != "flags":
                reader = "text to YAML" if source.kind == "yaml" else "text"
                said.append(f"{source.called(field.name)}: {shown(value)} is {reader} and was taken as {mended[key]}.")
    return mended


def _mend(value: Any, takes: Takes) -> Any:
    """The same value, or the one that it can only have meant."""
    if takes.kind in ("integer", "number"):
        return _mend_number(value, whole=takes.kind == "integer")
    if takes.kind == "words" and isinstance(value, str):
        by_fold = {_fold(word): word for word in takes.words}
        return by_fold.get(_fold(value), value.lower() if "layers:K" in takes.words else value)
    if takes.kind == "list":
        return _mend_list(value, takes)
    return value


def _mend_number(value: Any, *, whole: bool) -> Any:
    number = value
    if isinstance(value, str):
        share = value.strip().endswith("%") and not whole
        number = as_number(value.strip().removesuffix("%") if share else value)
        number = number / 100 if share and number is not None else number
    if number is None or isinstance(number, bool) or not isinstance(number, int | float):
        return value
    if math.isnan(number) or abs(number) > LARGEST:
        return value
    if whole and isinstance(number, float):
        return int(number) if number.is_integer() else value
    return number


def _mend_list(value: Any, takes: Takes) -> Any:
    assert takes.item is not None
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list):
        return value
    if "all" in takes.words and value in (["all"], ["all-linear"]):
        return "all"
    return [_mend(each, takes.item) for each in value]


def _fold(word: str) -> str:
    return word.strip().lower().replace("-", "_")


# --- what is wrong ------------------------------------------------------------------------------


Fault = tuple[str, ConfigError]
"""The field that is wrong, by its dotted path, and the sentence about it."""


def _levers_faults(levers: object, source: Source) -> Iterator[Fault]:
    for key, value in levers.items() if isinstance(levers, Mapping) else ():
        path = f"levers.{key}"
        if key in COSTLY:
            sentence = f"{source.called(path)} changes the result of the training, so it is no free lever"
            yield path, ConfigError(f"{sentence}: write it as {COSTLY[key]}")
        elif key not in FREE_LEVERS:
            yield path, _unknown("levers", key, source)
        elif not _is_taken(value, job_fields()[path].takes):
            yield path, wrong(path, value, source)


def _is_taken(value: object, takes: Takes) -> bool:
    """Whether a lever takes this."""
    if takes.kind == "switch":
        return isinstance(value, bool)
    if takes.kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool) and value >= (takes.least or 0)
    if not isinstance(value, str) or not value.strip():
        return False
    if "layers:K" in takes.words:
        try:
            checkpointing_from_word(value)
        except ConfigError:
            return False
        return True
    return not takes.words or value in takes.words


@cache
def _adapter() -> TypeAdapter[Job]:
    from pydantic import TypeAdapter

    return TypeAdapter(Job)


def _validated(tree: Mapping[str, Any]) -> Job | Mapping[tuple[int | str, ...], str]:
    """The job, or where pydantic found fault and of which type."""
    from pydantic import ValidationError

    try:
        # As JSON, where strict still lets a list be a tuple and a mapping a block, but no `true` be a number.
        return _adapter().validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        return {tuple(each["loc"]): each["type"] for each in error.errors(include_url=False, include_input=False)}


def _faults(found: Mapping[tuple[int | str, ...], str], tree: Mapping[str, Any], source: Source) -> Iterator[Fault]:
    """The worst first: fields that nobody knows, then a model that is missing, then values that are wrong."""
    for place, kind in found.items():
        if kind == "unexpected_keyword_argument":
            parent, key = ".".join(map(str, place[:-1])), str(place[-1])
            yield f"{parent}.{key}" if parent else key, _unknown(parent, key, source)
    if "missing" in found.values():
        where = f"{source.file} names no model" if source.file else "say which model"
        ask = "add `model:`" if source.file else "--model"
        yield "model", ConfigError(f"{where}: {ask} with a preset (`tightfit models`), a Hugging Face id or a folder")
    said = set()
    for place, kind in found.items():
        if kind in ("unexpected_keyword_argument", "missing"):
            continue
        path = ""
        value: Any = tree
        for step in place:  # behind the field's own name come indices and the names of union branches
            longer = f"{path}.{step}" if path else str(step)
            if longer not in job_fields():
                break
            path, value = longer, value[step]
        if path not in said:
            said.add(path)
            yield path, wrong(path, value, source) if path else _unreadable(source)


def _unreadable(source: Source) -> ConfigError:
    """Of the whole tree, where pydantic could not even name a field: half a letter, say, which JSON cannot hold."""
    return ConfigError(f"{source.file or 'the command line'} holds text that is no UTF-8: write it in plain letters")


def _unknown(parent: str, key: str, source: Source) -> ConfigError:
    names = list(job_fields())
    path = f"{parent}.{key}" if parent else key
    where = f" in {source.file}" if source.file else ""
    sentence = f"unknown field {shown(path)}{where}"
    if "." in key:
        block, _, inside = key.rpartition(".")
        return ConfigError(f"{sentence}; a field of a block stands inside it: write {block}: {{{inside}: …}}")
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == parent]
    close = nearest(key, beside if parent else [*beside, *MARKS])
    meant = f"{parent}.{close}" if parent and close else close
    if meant is None or key in OTHER_NAMES:
        elsewhere = (name for name in names if name.rpartition(".")[2] == key)
        meant = OTHER_NAMES.get(key) or next(elsewhere, None) or meant
    if meant:
        return ConfigError(f"{sentence}; did you mean '{meant}'?")
    if parent:
        return ConfigError(f"{sentence}; {parent} takes {listed(beside)}")
    return ConfigError(f"{sentence}; `tightfit schema --table` lists the fields there are")
