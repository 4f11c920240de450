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
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tightfit.inputs.records import read_json
from tightfit.messages import Message, Said, message_of
from tightfit.train.data.build import PIECE_BYTES
from tightfit.train.data.cache import first_layout
from tightfit.train.data.chat import Rendered
from tightfit.train.data.encode import Encoded, Encoder, encoder_of
from tightfit.train.data.layouts import Example, ExampleError, Layout, example_of
from tightfit.train.data.prompt import SectionCount, prompter_of
from tightfit.train.data.recipe import ALL_ON, Resolved, read_recipe, resolve
from tightfit.train.data.sources import SourceFile, find_source, not_utf8, trees_in
from tightfit.train.data.spec import DataSpec, check_spec
from tightfit.train.data.tokens import codec_of, load_tokenizer
from tightfit.types import ConfigError

LOOKED_AT = 200
"""Examples that the summary counts."""

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


@dataclass(slots=True)
class _Sum:
    """Counts over the examples of one ablation."""

    examples: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    skipped: int = 0
    sections: dict[str, SectionCount] = field(default_factory=dict)

    def add(self, samples: list[Encoded], sections: tuple[SectionCount, ...] = ()) -> None:
        self.examples += 1
        self.samples += len(samples)
        self.skipped += not samples
        for sample in samples:
            self.tokens += len(sample.ids)
            self.loss_tokens += sample.loss_tokens
            self.cut += sample.cut
        for each in sections:
            self.sections[each.field] = self.sections.get(each.field, SectionCount(field=each.field)).plus(each)

    def line(self, ablation: str | None) -> dict[str, Any]:
        counts = {
            name: getattr(self, name) for name in ("examples", "samples", "tokens", "loss_tokens", "cut", "skipped")
        }
        sections = [asdict(each) for each in self.sections.values()]
        return {"kind": "summary", "ablation": ablation, **counts, "sections": sections}


def preview(spec: DataSpec, tokenizer: Any, count: int) -> Iterator[dict[str, Any]]:
    """Every line of the preview."""
    check_spec(spec)
    if spec.is_generated:
        raise ConfigError(Message("data.nothing-to-preview"))
    codec = codec_of(tokenizer, spec.template)
    encoder = encoder_of(codec, spec.sequence, spec.overlong)
    head = {
        "kind": "head",
        "tokenizer": spec.tokenizer or Message("data.byte-tokenizer"),
        "template": codec.template_name,
        "sequence": spec.sequence,
    }
    if spec.by_recipe:
        resolved = resolve(spec)
        yield {**head, "source": resolved.name, "format": "recipe", "said": [*codec.said, *resolved.said]}
        yield from _recipe_lines(spec, resolved, encoder, count)
        return
    chat, lines = _file_lines(spec, encoder, count)
    yield {**head, "source": spec.path, "format": "chat" if chat else "text", "said": list(codec.said) if chat else []}
    yield from lines


# --- files ----------------------------------------------------------------------------------------


def _file_lines(spec: DataSpec, encoder: Encoder, count: int) -> tuple[bool, Iterator[dict[str, Any]]]:
    assert spec.path is not None
    source = find_source(spec.path, spec.format)
    file = source.files[0]
    if file.kind == "text":
        return False, _text_lines(file.path, encoder, count)
    layout = source.layout or first_layout(file, spec.format)
    return layout.kind != "text", _example_lines(file, layout, encoder, count)


def _text_lines(path: Path, encoder: Encoder, count: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        raw = file.read(PIECE_BYTES // 4)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.end < len(raw) or len(raw) < PIECE_BYTES // 4:
            raise not_utf8(path) from None
        text = raw[: error.start].decode("utf-8-sig")
    if not text:
        raise ConfigError(Message("data.empty", path=path))
    total = _Sum()
    samples = encoder.samples(Example(text=text))
    total.add(samples)
    for number, sample in enumerate(samples[:count], start=1):
        yield _example(Message("data.part", number=number), encoder, sample, None)
    yield total.line(None)


def _example_lines(file: SourceFile, layout: Layout, encoder: Encoder, count: int) -> Iterator[dict[str, Any]]:
    total = _Sum()
    shown = 0
    for name, tree in islice(trees_in(file), LOOKED_AT):
        try:
            example = example_of(tree, layout)
            samples = encoder.samples(example)
        except (ExampleError, ConfigError) as error:
            problem = message_of(error)
            raise ConfigError(Message("data.bad-example", name=name, path=file.path, problem=problem)) from None
        total.add(samples)
        if shown < count and samples:
            shown += 1
            rendered = encoder.template.render_pieces(example.turns) if example.text is None else None
            yield _example(name, encoder, samples[0], rendered)
    yield total.line(None)


# --- recipes --------------------------------------------------------------------------------------


def _recipe_lines(spec: DataSpec, resolved: Resolved, encoder: Encoder, count: int) -> Iterator[dict[str, Any]]:
    """Examples of the ablation that was asked for; counts of it, or of all where none was."""
    yield from _arm_lines(resolved, encoder, count)
    if spec.ablation is not None:
        return
    for name, _ in read_recipe(spec.recipe or "shipped:persona").ablations:
        if name != ALL_ON:
            yield from _arm_lines(resolve(replace(spec, ablation=name)), encoder, 0)


def _arm_lines(resolved: Resolved, encoder: Encoder, count: int) -> Iterator[dict[str, Any]]:
    prompter = prompter_of(resolved.json, encoder)
    total = _Sum()
    shown = 0
    for record in islice(resolved.records(), LOOKED_AT):
        try:
            made = prompter.prompt(record)
        except ExampleError as error:
            name, problem = record["name"], message_of(error)
            raise ConfigError(Message("data.bad-example", name=name, path=resolved.name, problem=problem)) from None
        total.add([made.encoded] if made.encoded is not None else [], made.sections)
        if shown < count and made.encoded is not None:
            shown += 1
            line = _example(made.name, encoder, made.encoded, made.rendered)
            yield line | {"ablation": resolved.arm, "sections": [asdict(each) for each in made.sections]}
    yield total.line(resolved.arm)


# --- one example ----------------------------------------------------------------------------------


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
