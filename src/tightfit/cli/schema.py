"""`tightfit schema`: what a job file may say, for programs and for people.

Both forms are made from `Job` itself, so that neither can say what the door does not check. The free levers,
which `Job` keeps as one mapping, are described from what stands on their fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.cli.flags import Parser, without_default
from tightfit.job.fields import FREE_LEVERS, Takes, job_fields, meanings
from tightfit.messages import explain_field, text

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SHORT = {"saving": {"every": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}]}}
"""By block: words that stand for several of its fields, and are not fields of `Job`."""


def parser() -> Parser:
    made = Parser("schema", "[--table]", "tightfit schema > job.schema.json")
    made.takes("table")
    return made.ends_with("0", "2")


def schema(argv: Sequence[str]) -> int:
    args = parser().parse(argv)
    print(field_table() if hasattr(args, "table") else json.dumps(job_schema(), indent=2, ensure_ascii=False))
    return 0


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file."""
    from pydantic import TypeAdapter

    from tightfit.job import Job

    made = TypeAdapter(Job).json_schema()
    blocks = made.pop("$defs", {})
    made["properties"] = _describe(made["properties"], "", blocks)
    return {"$schema": DIALECT} | made | {"title": text("cli.job-title")}


def field_table() -> str:
    """Every field that holds a value: its name, what it takes, its default and its meaning."""
    heads = (text("cli.field"), text("cli.takes"), text("cli.default"), text("cli.meaning"))
    rows = [heads, ("---",) * 4]
    for field in job_fields().values():
        if field.takes.kind == "block" or field.name == "levers":  # it holds others
            continue
        lever = field.name.removeprefix("levers.")
        if lever != field.name:
            default, meaning = text("cli.plan-chooses"), _lever_meaning(lever)
        else:
            meaning = " ".join(explain_field("job", field.name, meanings()[field.name]).split())
            if field.required:
                default = text("cli.must-said")
            elif field.default is None or field.default == ():
                default = ""
            else:
                default = f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"
        rows.append((f"`{field.name}`", str(field.phrase), default, meaning))
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _describe(properties: Mapping[str, Any], prefix: str, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """The same properties, each with its sentence, and each block written out where it stands."""
    described = {}
    for name, each in properties.items():
        path = prefix + name
        if "$ref" in each:
            about = text("cli.every")
            short = {each: {"anyOf": kinds, "description": about} for each, kinds in SHORT.get(path, {}).items()}
            block = dict(blocks[each["$ref"].rpartition("/")[2]])
            described[name] = _without_title(block) | {
                "description": explain_field("job", path, meanings()[path]),
                "properties": _describe(block["properties"], f"{path}.", blocks) | short,
            }
        elif path == "levers":
            levers = {each: _lever_schema(job_fields()[f"levers.{each}"].takes) for each in FREE_LEVERS}
            described[name] = {
                "type": "object",
                "description": explain_field("job", "levers", meanings()["levers"]),
                "additionalProperties": False,
                "properties": {lever: {**it, "description": _lever_meaning(lever)} for lever, it in levers.items()},
            }
        else:
            described[name] = _without_title(each) | {"description": explain_field("job", path, meanings()[path])}
    return described


def _without_title(each: Mapping[str, Any]) -> dict[str, Any]:
    """pydantic titles a field by its own name in capitals, which says nothing."""
    return {key: value for key, value in each.items() if key != "title"}


def _lever_schema(takes: Takes) -> dict[str, Any]:
    if takes.kind == "switch":
        return {"type": "boolean"}
    if takes.kind == "integer":
        number = {"type": "integer", "minimum": takes.least} | ({} if takes.most is None else {"maximum": takes.most})
        return {"anyOf": [number, {"enum": list(takes.words)}]} if takes.words else number
    if "layers:K" in takes.words:
        return {
            "type": "string",
            "pattern": r"^(none|full|full\+offload|layers:[0-9]+|select:[a-z, ]+(\+offload)?(\+layers:[0-9]+)?)$",
        }
    return {"type": "string", "enum": list(takes.words)} if takes.words else {"type": "string"}


def _lever_meaning(name: str) -> str:
    """The help of the flag, without its default: a lever that is not pinned is the plan's to choose."""
    english = without_default(FREE_LEVERS[name].help)
    first, _, rest = english.partition(" ")
    english = f"{english}." if first.endswith(":") else f"{first.capitalize() if first.islower() else first} {rest}."
    return without_default(explain_field("levers", name, english))
