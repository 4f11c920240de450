"""What the model will see: `python -m tightfit.train preview SPEC.json` prints JSON lines, and the desk draws them.

No cache is built: the first examples are rendered and encoded as a build would do it. Lines are of these kinds:

    head      tokenizer, template, format, sentences that have to be known
    example   its text in pieces with and without loss, its tokens, how its sections fared
    summary   the same counted over the examples looked at, one for each ablation
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tightfit.inputs.records import read_json
from tightfit.messages import Message, Said, message_of
from tightfit.train.data.cache import PIECE_BYTES, Counts
from tightfit.train.data.chat import Rendered
from tightfit.train.data.examples import (
    TEXT,
    ExampleError,
    Layout,
    SourceFile,
    example_of,
    find_source,
    first_layout,
    not_utf8,
    trees_in,
)
from tightfit.train.data.recipes import ALL_ON, Prompter, Resolved, SectionCount, resolve
from tightfit.train.data.spec import DataSpec, check_spec
from tightfit.train.data.tokens import Encoded, Encoder, codec_of, load_tokenizer
from tightfit.types import ConfigError

LOOKED_AT = 200  # examples that the summary counts
ANY_VOCABULARY = 2**31


def main(path: str) -> int:
    """Print the preview that a spec file asks for."""
    asked = read_json(Path(path))
    spec = DataSpec(**asked["data"])
    vocabulary = asked.get("vocab_size") or ANY_VOCABULARY
    tokenizer = load_tokenizer(spec.tokenizer, vocabulary, trust_remote_code=bool(asked.get("trust_remote_code")))
    for line in preview(spec, tokenizer, int(asked["count"])):
        sys.stdout.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    return 0


def preview(spec: DataSpec, tokenizer: Any, count: int) -> Iterator[dict[str, Any]]:
    """Every line of the preview."""
    check_spec(spec)
    if spec.is_generated:
        raise ConfigError(Message("data.nothing-to-preview"))
    codec = codec_of(tokenizer, spec.template)
    encoder = Encoder(codec, spec.sequence, spec.overlong)
    head = {
        "kind": "head",
        "tokenizer": spec.tokenizer or Message("data.byte-tokenizer"),
        "template": codec.template_name,
        "sequence": spec.sequence,
    }
    if spec.by_recipe:
        resolved = resolve(spec)
        yield {**head, "source": resolved.talks.name, "format": "recipe", "said": [*codec.said, *resolved.talks.said]}
        yield from _lines(_prompts(resolved, encoder), encoder, count, resolved.arm)
        names = [name for name in resolved.recipe.ablations if name != ALL_ON] if spec.ablation is None else []
        for arm in names:  # counts of all where none was asked for
            yield from _lines(_prompts(resolve(replace(spec, ablation=arm)), encoder), encoder, 0, arm)
        return
    assert spec.path is not None
    source = find_source(spec.path, spec.format)
    file = source.files[0]
    layout = TEXT if file.kind == "text" else source.layout or first_layout(file, spec.format)
    chat = layout.kind != "text"
    yield {**head, "source": spec.path, "format": "chat" if chat else "text", "said": list(codec.said) if chat else []}
    if file.kind != "text":
        yield from _lines(_examples(file, layout, encoder), encoder, count, None)
        return
    with file.path.open("rb") as opened:
        raw = opened.read(PIECE_BYTES // 4)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.end < len(raw) or len(raw) < PIECE_BYTES // 4:
            raise not_utf8(file.path) from None
        text = raw[: error.start].decode("utf-8-sig")
    if not text:
        raise ConfigError(Message("data.empty", path=file.path))
    samples, total = encoder.samples(text), Counts()
    total.add(samples)
    for number, sample in enumerate(samples[:count], start=1):
        yield _example(Message("data.part", number=number), encoder, sample, None)
    yield {"kind": "summary", "ablation": None, **total.as_json()}


Looked = tuple[Said, list[Encoded], Rendered | None, tuple[SectionCount, ...]]
"""An example's name, its samples, its whole text where it is a chat, and how its sections fared."""


def _lines(looked: Iterator[Looked], encoder: Encoder, count: int, arm: str | None) -> Iterator[dict[str, Any]]:
    """The first `count` examples that have samples, and the summary of all."""
    total = Counts()
    for name, samples, rendered, sections in islice(looked, LOOKED_AT):
        total.add(samples, sections)
        if count > 0 and samples:
            count -= 1
            line = _example(name, encoder, samples[0], rendered)
            yield line | {"ablation": arm, "sections": [asdict(each) for each in sections]}
    yield {"kind": "summary", "ablation": arm, **total.as_json()}


def _examples(file: SourceFile, layout: Layout, encoder: Encoder) -> Iterator[Looked]:
    for name, tree in trees_in(file):
        try:
            example = example_of(tree, layout)
            samples = encoder.samples(example)
        except (ExampleError, ConfigError) as error:
            problem = message_of(error)
            raise ConfigError(Message("data.bad-example", name=name, path=file.path, problem=problem)) from None
        yield name, samples, None if isinstance(example, str) else encoder.template.render_pieces(example), ()


def _prompts(resolved: Resolved, encoder: Encoder) -> Iterator[Looked]:
    prompter = Prompter(resolved.sections, encoder)
    for record in resolved.records():
        try:
            made = prompter.prompt(record)
        except ExampleError as error:
            where = {"name": record["name"], "path": resolved.talks.name}
            raise ConfigError(Message("data.bad-example", **where, problem=message_of(error))) from None
        yield record["name"], [made.encoded] if made.encoded is not None else [], made.rendered, made.sections


def _example(name: Said, encoder: Encoder, sample: Encoded, rendered: Rendered | None) -> dict[str, Any]:
    # The sample's text as the tokens say it, in runs with and without loss: what is learned, not what was meant.
    learned = sample.learned.tolist()
    pieces = []
    start = 0
    for at in range(1, len(learned) + 1):
        if at == len(learned) or learned[at] != learned[start]:
            text = encoder.codec.decode(sample.ids[start:at])
            pieces.append({"text": text, "loss": bool(learned[start])})
            start = at
    return {
        "kind": "example",
        "name": name,
        "ablation": None,
        "pieces": pieces,
        "tokens": len(sample.ids),
        "loss_tokens": sample.loss_tokens,
        "whole_tokens": len(encoder.whole(rendered).ids) if rendered is not None else len(sample.ids),
        "sections": [],
    }
