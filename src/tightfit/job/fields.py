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
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from tightfit.inputs.flags import LEVERS, checkpointing_from_word, words_of
from tightfit.inputs.spelling import LARGEST, as_number, fold, nearest, shown, suggest
from tightfit.job import Job
from tightfit.job.text import name_in
from tightfit.job.training import FIELD_OF, MARKS
from tightfit.messages import Choice, Message, Said
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
    **FIELD_OF,
    **{lever.path: _FIELD_OF_LEVER[flag] for flag, lever in LEVERS.items() if flag != lever.path},
    **{flag: field for flag, field in _FIELD_OF_LEVER.items() if not field.endswith(flag)},
    **{other: _FIELD_OF_LEVER[lever.flag] for lever in LEVERS.values() for other in lever.also},
    "ablation_config": "data.ablation",
    "batch_size": "effective_batch",
    "bf16": "precision",
    "dataset": "data.path",
    "fp16": "precision",
    "gradient_checkpointing": "levers.checkpointing",
    "rank": "lora.rank",
    "stage": "levers.engine",
    "world": "hardware.gpus",
    "zero_stage": "levers.engine",
}
"""What other programs call our fields, where the spelling alone would not show it."""

EXAMPLES = {
    "model": Message("job.name-or-block"),
    "hardware.gpus": Message("job.hardware-word"),
    "hardware.host_ram": Message("job.size-such-as", size="256GB"),
    "hardware.nvme": Message("job.size-such-as", size="2TB"),
    "hardware.network": Message("job.network-word"),
    "hardware.link": Message("job.link-word"),
    "limits.gpu_memory": Message("job.size-such-as", size="20GB"),
    "limits.host_ram": Message("job.size-such-as", size="200GB"),
    "timeout": Message("job.time-such-as"),
    "levers.deepspeed_version": Message("job.version-in-quotes"),
    "levers.resident": Message("job.number-or-auto"),
}
"""What has a form of its own."""

Kind = Literal["integer", "number", "switch", "text", "words", "list", "fields", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What a field takes, as read from its type."""

    kind: Kind
    words: tuple[str, ...] = ()  # the few words that are right; of a list: a word that may stand in its place
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    item: Takes | None = None  # of a list: what each of its items is
    nullable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobField:
    """One field of a job file."""

    name: str  # its dotted path
    takes: Takes
    default: object = None
    required: bool = False

    @property
    def phrase(self) -> Message:
        """What it takes, to stand after `must be`."""
        return EXAMPLES.get(self.name) or _phrase(self.takes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a job was written, and how its sentences call a field."""

    file: str | None = None
    names: Mapping[str, str]  # dotted path → what the user wrote: a flag, or a field of another form of file
    kind: Literal["yaml", "json", "flags"] = "flags"

    def name(self, path: str) -> str:
        return self.names.get(path, path)

    def place(self, path: str) -> Said:
        """The same, with the file that it stands in."""
        name = self.name(path)
        return name if name.startswith("--") else name_in(name, self.file)


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
        required = each.default is MISSING and each.default_factory is MISSING
        yield JobField(name=prefix + each.name, takes=takes, default=default_of(each), required=required)
        if takes.kind == "block":
            yield from _fields_in(hints[each.name], f"{prefix}{each.name}.")


def default_of(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return None if each.default is MISSING else each.default


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
        names = {Ge: ("least", "ge"), Gt: ("above", "gt"), Le: ("most", "le"), Lt: ("below", "lt")}
        bounds = [(names[type(bound)], bound) for bound in hint.__metadata__ if type(bound) in names]
        return replace(_takes(inside[0]), **{name: getattr(bound, end) for (name, end), bound in bounds})
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


def _lever_takes(lever: Lever) -> Takes:
    if words := words_of(lever):
        return Takes(kind="words", words=words)
    return replace(_takes(lever.type), words=("auto",) * lever.auto, least=lever.least, most=lever.most)


_NOUNS: Mapping[Kind, str] = {
    "integer": "inputs.whole-number",
    "number": "inputs.number",
    "switch": "inputs.true-or-false",
    "text": "inputs.text",
    "fields": "job.block",
    "block": "job.block",
}
_PLURALS: Mapping[Kind, str] = {"integer": "job.whole-numbers", "text": "job.names", "fields": "job.blocks"}


def _phrase(takes: Takes) -> Message:
    if takes.kind == "words":
        return Message("job.one-of", words=Choice(takes.words))
    if takes.kind == "list":
        assert takes.item is not None
        plural = _PLURALS.get(takes.item.kind)
        many = Message(plural) if plural else Choice(takes.item.words)
        others = Choice(f"`{word}`" for word in takes.words) if takes.words else None
        return Message("job.list", many=many, range=_range(takes.item), others=others)
    return Message("job.in-range", noun=Message(_NOUNS[takes.kind]), range=_range(takes))


def _range(takes: Takes) -> Said:
    least, above, most = takes.least, takes.above, takes.most
    if least is not None and takes.below is not None:
        return Message("job.from-to-below", least=least, below=takes.below)
    if least is not None:
        whole = most is None
        return Message("job.of-at-least", least=least) if whole else Message("job.from-to", least=least, most=most)
    if above is None:
        return ""
    return Message("job.above", above=above) if most is None else Message("job.above-at-most", above=above, most=most)


# --- from a tree to a job -----------------------------------------------------------------------


def job_from_tree(tree: Mapping[str, Any], source: Source) -> tuple[Job, tuple[Said, ...]]:
    """The job that a tree of plain values means, and what had to be taken for something else."""
    said: list[Said] = []
    mended = _mend_block(tree, "", source, said)
    for _, fault in _levers_faults(mended.get("levers"), source):
        raise fault
    job = _validate(mended)
    if not isinstance(job, Job):
        raise next(_faults(job, mended, source))[1]
    return job, tuple(said)


def faults_in_tree(tree: Mapping[str, Any], source: Source) -> tuple[Job | None, tuple[ConfigError, ...]]:
    """Every error that `job_from_tree` could raise, and the job that is left without those fields.

    There is no job where what is wrong cannot be left out: a model, or a whole block.
    """
    mended = _mend_block(tree, "", source, [])
    found = list(_levers_faults(mended.get("levers"), source))
    job = _validate(mended)
    if not isinstance(job, Job):
        found += _faults(job, mended, source)
    for path, _ in found:
        block, _, key = path.rpartition(".")
        inside = mended.get(block) if block else mended
        if isinstance(inside, dict):
            inside.pop(key, None)
    job = _validate(mended)
    return job if isinstance(job, Job) else None, tuple(fault for _, fault in found)


def wrong(path: str, value: object, source: Source) -> ConfigError:
    """The error for a value that a field does not take."""
    field = job_fields()[path]
    takes, name, place = field.takes, source.name(path), source.place(path)
    words = takes.item.words if takes.item is not None else takes.words
    if takes.kind == "list" and isinstance(value, list):
        strays = [each for each in value if words and each not in words]
        value = strays[0] if strays else value
    if isinstance(value, str) and value.strip() and words and takes.kind in ("words", "list"):
        hint = suggest(value, words)
        return ConfigError(Message("inputs.unknown-word", name=place, value=shown(value), hint=hint), at=name)
    why: Message | None = None
    if isinstance(value, int | float) and takes.most is not None and value > takes.most:
        must = Message("inputs.at-most", most=f"{takes.most:.0f}")
    else:
        must = EXAMPLES.get(path) or _phrase(replace(takes, most=None))  # the end that it is not beyond says nothing
        if value is None and not field.required:
            why = Message("job.leave-out")
        elif isinstance(value, bool) and takes.kind in ("text", "words") and source.kind == "yaml":
            why = Message("job.yaml-reads-so")
        elif isinstance(value, str) and takes.kind == "switch" and value.lower() in ("true", "false"):
            why = Message("inputs.without-quotes")
    return ConfigError(Message("inputs.must-be", name=place, must=must, value=shown(value), hint=why), at=name)


def _mend_block(values: Mapping[str, Any], prefix: str, source: Source, said: list[Said]) -> dict[str, Any]:
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
                what = "job.text-to-yaml" if source.kind == "yaml" else "job.text-number"
                said.append(Message(what, place=source.place(field.name), value=shown(value), number=mended[key]))
    return mended


def _mend(value: Any, takes: Takes) -> Any:
    """The same value, or the one that it can only have meant."""
    if takes.kind in ("integer", "number"):
        whole = takes.kind == "integer"
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
    if takes.kind == "words" and value is False and "off" in takes.words:
        return "off"  # which YAML reads as a switch
    if takes.kind == "words" and isinstance(value, str):
        by_fold = {fold(word): word for word in takes.words}
        return by_fold.get(fold(value), value.lower() if "layers:K" in takes.words else value)
    if takes.kind == "list":
        assert takes.item is not None
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",") if word.strip()]
        elif isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if "all" in takes.words and value in (["all"], ["all-linear"]):
            return "all"
        return [_mend(each, takes.item) for each in value] if isinstance(value, list) else value
    return value


# --- what is wrong ------------------------------------------------------------------------------


Fault = tuple[str, ConfigError]  # the field that is wrong, by its dotted path, and the sentence about it


def _levers_faults(levers: object, source: Source) -> Iterator[Fault]:
    for key, value in levers.items() if isinstance(levers, Mapping) else ():
        path = f"levers.{key}"
        if key in COSTLY:
            fix = Message("job.write-as-field", field=COSTLY[key])
            said = Message("job.no-free-lever", name=source.place(path), fix=fix)
            yield path, ConfigError(said, at=source.name(path))
        elif key not in FREE_LEVERS:
            yield path, _explain_unknown("levers", key, source)
        elif not _is_taken(value, job_fields()[path].takes):
            yield path, wrong(path, value, source)


def _is_taken(value: object, takes: Takes) -> bool:
    """Whether a lever takes this."""
    if takes.kind == "switch":
        return isinstance(value, bool)
    if takes.kind == "integer" and value not in takes.words:
        return isinstance(value, int) and not isinstance(value, bool) and value >= (takes.least or 0)
    if not isinstance(value, str) or not value.strip():
        return False
    if "layers:K" in takes.words:
        with suppress(ConfigError):
            checkpointing_from_word(value)
            return True
        return False
    return not takes.words or value in takes.words


@cache
def _adapter() -> TypeAdapter[Job]:
    from pydantic import TypeAdapter

    return TypeAdapter(Job)


def _validate(tree: Mapping[str, Any]) -> Job | Mapping[tuple[int | str, ...], str]:
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
            yield f"{parent}.{key}" if parent else key, _explain_unknown(parent, key, source)
    if "missing" in found.values():
        no_model = Message("job.no-model-in", where=source.file, fix=Message("job.add-model"))
        yield "model", ConfigError(no_model if source.file else Message("job.which-model"))
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
            # Of the whole tree pydantic cannot even name a field: half a letter, say, which JSON cannot hold.
            where, fix = source.file or Message("job.command-line"), Message("job.write-plain-letters")
            not_utf8 = ConfigError(Message("job.not-utf8", where=where, fix=fix))
            yield path, wrong(path, value, source) if path else not_utf8


def _explain_unknown(parent: str, key: str, source: Source) -> ConfigError:
    names = list(job_fields())
    path = f"{parent}.{key}" if parent else key

    def unknown(hint: Message) -> ConfigError:
        return ConfigError(Message("job.unknown-field", field=shown(path), file=source.file, hint=hint), at=path)

    if "." in key:
        block, _, inside = key.rpartition(".")
        return unknown(Message("job.inside-block", block=block, field=inside))
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == parent]
    close = nearest(key, beside if parent else [*beside, *MARKS])
    meant = f"{parent}.{close}" if parent and close else close
    if meant is None or key in OTHER_NAMES:
        elsewhere = (name for name in names if name.rpartition(".")[2] == key)
        meant = OTHER_NAMES.get(key) or next(elsewhere, None) or meant
    if meant:
        return unknown(Message("inputs.did-you-mean", close=meant))
    if parent:
        return unknown(Message("job.block-takes", block=parent, names=Choice(beside)))
    return unknown(Message("job.see-schema"))
