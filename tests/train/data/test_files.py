"""Every kind of file that is read, and the one sentence for each that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tightfit.messages import Message
from tightfit.train.data.examples import SourceFile, array_items, trees_in
from tightfit.train.data.samples import IGNORED, Samples, Split
from tightfit.train.data.spec import DataSpec
from tightfit.types import ConfigError

Built = Callable[..., Split]
Counted = Callable[..., dict[str, Any]]
Lines = Callable[..., str]


def texts(samples: Samples, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(samples[at].ids) for at in range(len(samples))]


def answers(samples: Samples, tokenizer: Any) -> list[str]:
    """What is learned of each sample."""
    return [tokenizer.decode([label for label in samples[at].labels if label != IGNORED]) for at in range(len(samples))]


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [16, 100, 5000])
def test_every_token_of_a_text_file_is_there_once(
    built: Built, words_tokenizer: Any, tmp_path: Path, sequence: int
) -> None:
    text = "".join(f"Line {number} of the täxt – 你好.\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    train = built(DataSpec(path=str(tmp_path / "a.txt"), sequence=sequence), words_tokenizer).train
    ids = np.concatenate([train[at].ids for at in range(len(train))])
    assert ids.tolist() == [*words_tokenizer(text)["input_ids"], words_tokenizer.eos_token_id]
    assert set(train.lengths[:-1].tolist()) <= {sequence}
    assert train.loss_tokens.tolist() == [length - 1 for length in train.lengths]
    assert all(train[at].labels[0] == IGNORED for at in range(len(train)))


def test_a_folder_of_files(built: Built, bytes_tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("second", encoding="utf-8")
    (folder / "a.txt").write_text("\ufefffirst", encoding="utf-8")
    (folder / "deep" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n', encoding="utf-8")
    (folder / ".hidden.txt").write_text("no", encoding="utf-8")
    (folder / "notes.pdf").write_bytes(b"\x00")
    train = built(DataSpec(path=str(folder), sequence=64), bytes_tokenizer).train
    assert texts(train, bytes_tokenizer) == [f"{word}<|end|>" for word in ("first", "second", "third", "fourth")]


def test_a_folder_may_mix_text_and_chats(built: Built, bytes_tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("plain text", encoding="utf-8")
    (folder / "b.jsonl").write_text('{"instruction": "Say yes.", "output": "Yes."}\n', encoding="utf-8")
    (folder / "c.txt").write_text("more text", encoding="utf-8")
    train = built(DataSpec(path=str(folder), sequence=128), bytes_tokenizer).train
    assert answers(train, bytes_tokenizer) == ["lain text<|end|>", "Yes.<|im_end|>", "ore text<|end|>"]


def test_long_texts_in_lines_are_cut_into_samples(
    kept: Built, counted: Counted, words_tokenizer: Any, lines: Lines
) -> None:
    long = "The bear sat under a tree. " * 30
    spec = DataSpec(path=lines({"text": long}, {"text": "A fox."}), sequence=50)
    train = kept(spec, words_tokenizer).train
    whole = [*words_tokenizer(long)["input_ids"], words_tokenizer.eos_token_id]
    count = -(-len(whole) // 50)
    assert np.concatenate([train[at].ids for at in range(count)]).tolist() == whole
    assert len(train) == count + 1
    assert counted(spec, words_tokenizer)["cut"] == counted(spec, words_tokenizer)["skipped"] == 0


# --- chats ----------------------------------------------------------------------------------------

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Count.", "history": [["Hi", "Hello"]]}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Count."},
        {"from": "human", "value": "1 2"},
        {"from": "gpt", "value": "3"},
        {"from": "human", "value": "more"},
    ]
}
MESSAGES = {
    "messages": [
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": [{"type": "text", "text": "3"}]},
    ]
}


@pytest.mark.parametrize(
    ("tree", "learned"),
    [(ALPACA, "Hello<|im_end|>3<|im_end|>"), (SHAREGPT, "3<|im_end|>"), (MESSAGES, "3<|im_end|>")],
    ids=["alpaca", "sharegpt", "messages"],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_chats_are_recognised_and_their_answers_learned(
    built: Built, bytes_tokenizer: Any, tmp_path: Path, tree: Any, learned: str, name: str
) -> None:
    path = tmp_path / name
    many = [tree] * 3
    text = json.dumps(many, indent=2) if name == "data.json" else "\n".join(map(json.dumps, many))
    path.write_text(text, encoding="utf-8")
    train = built(DataSpec(path=str(path), sequence=512), bytes_tokenizer).train
    assert answers(train, bytes_tokenizer) == [learned] * 3
    assert train.loss_tokens.tolist() == [len(bytes_tokenizer(learned)["input_ids"])] * 3


def test_alpaca_turns(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    (text,) = texts(built(DataSpec(path=lines(ALPACA), sequence=512), bytes_tokenizer).train, bytes_tokenizer)
    turns = [turn.partition("\n")[::2] for turn in text.replace("<|im_end|>\n", "").split("<|im_start|>")[1:]]
    assert turns == [
        ("system", "Count."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]


def test_a_json_file_with_an_object_a_line(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    path = lines(MESSAGES, MESSAGES, name="data.json")
    assert len(built(DataSpec(path=path, sequence=512), bytes_tokenizer).train) == 2


def test_conversations_of_role_and_content(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    path = lines({"conversations": MESSAGES["messages"]})
    for name in ("auto", "sharegpt", "messages"):
        train = built(DataSpec(path=path, format=name, sequence=512), bytes_tokenizer).train
        assert answers(train, bytes_tokenizer) == ["3<|im_end|>"]


@pytest.mark.parametrize(("overlong", "count"), [("cut", 3), ("skip", 2)])
def test_chats_that_are_too_long(
    kept: Built, counted: Counted, bytes_tokenizer: Any, lines: Lines, overlong: Any, count: int
) -> None:
    short = {"instruction": "a", "output": "b"}
    path = lines(short, {"instruction": "a", "output": "b" * 300}, {"instruction": "a" * 300, "output": "b"}, short)
    spec = DataSpec(path=path, overlong=overlong, sequence=128)
    train = kept(spec, bytes_tokenizer).train
    assert len(train) == count
    counts = counted(spec, bytes_tokenizer)
    assert (counts["cut"], counts["skipped"]) == ((1, 1) if overlong == "cut" else (0, 2))
    assert max(train.lengths) == (128 if overlong == "cut" else min(train.lengths))


# --- LLaMA-Factory --------------------------------------------------------------------------------


def info(folder: Path, **entries: Any) -> Path:
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def test_an_entry_with_its_own_columns_and_tags(
    built: Built, bytes_tokenizer: Any, tmp_path: Path, lines: Lines
) -> None:
    lines({"q": "One?", "a": "Two.", "who": "a teacher"}, name="own.jsonl")
    lines({"talk": [{"r": "U", "c": "One?"}, {"r": "B", "c": "Two."}]}, name="talks.jsonl")
    lines({"body": "A text."}, name="plain.jsonl")
    lines(ALPACA | {"history": "not read"}, ALPACA, name="usual.jsonl")
    path = info(
        tmp_path,
        own={"file_name": "own.jsonl", "columns": {"prompt": "q", "response": "a", "system": "who"}},
        talks={
            "file_name": "talks.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "talk"},
            "tags": {"role_tag": "r", "content_tag": "c", "user_tag": "U", "assistant_tag": "B"},
        },
        plain={"file_name": "plain.jsonl", "columns": {"prompt": "body"}},
        usual={"file_name": "usual.jsonl", "num_samples": 1},
        far={"hf_hub_url": "someone/something"},
        pairs={"file_name": "own.jsonl", "ranking": True},
    )

    def learned(name: str, where: Path = path) -> list[str]:
        train = built(DataSpec(path=f"{where}:{name}", sequence=256), bytes_tokenizer).train
        return answers(train, bytes_tokenizer)

    assert learned("own") == learned("own", tmp_path) == ["Two.<|im_end|>"]
    assert learned("talks") == ["Two.<|im_end|>"]
    assert learned("plain") == [" text.<|end|>"]
    assert learned("usual") == ["3<|im_end|>"]
    for name, sentence in {
        "ownn": "has no data set ownn: did you mean own?",
        "far": "is no local file: download it",
        "pairs": "holds rankings",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            learned(name)
    for where in (path, tmp_path):
        with pytest.raises(ConfigError, match="add which one after a colon"):
            built(DataSpec(path=str(where), sequence=64), bytes_tokenizer)


# --- what cannot be read --------------------------------------------------------------------------

GOOD = json.dumps({"instruction": "a", "output": "b"}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "a.txt is empty: name a file with examples"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n \n", "a.jsonl is empty"),
        ("a.json", b"[]", "a.json is empty"),
        ("a.txt", b"one\ntwo \xff\n", r"a.txt is not UTF-8 at line 2 \(byte 8\): save it as UTF-8"),
        ("a.jsonl", GOOD * 4 + b'{"instruction": "\xe4"}\n', r"a.jsonl is not UTF-8 at line 5 \(byte \d+\)"),
        ("a.json", b'[{"instruction": "\xe4"}]', r"a.json is not UTF-8 at line 1 \(byte 18\)"),
        ("a.jsonl", GOOD * 16 + b'{"instruction": \n' + GOOD, "line 17 of .*a.jsonl is not JSON: expecting value"),
        ("a.jsonl", b"{broken\n", "line 1 of .*a.jsonl is not JSON"),
        ("a.jsonl", GOOD * 2 + b'{"instruction": "a"}\n', "line 3 of .*a.jsonl has no output, which must be text"),
        ("a.jsonl", GOOD + b'{"instruction": "a", "output": 3}\n', "line 2 of .* has 3 as output"),
        ("a.jsonl", GOOD + b"[1, 2]\n", r"line 2 of .* is \[1, 2\], not an object with fields"),
        ("a.json", b"[" + GOOD + b"," + GOOD + b', {"instruction": "a"}]', "example 3 of .*a.json has no output"),
        ("a.json", b"[" + GOOD + b", {]", "example 2 of .*a.json is not JSON"),
        ("a.json", b'"text"', "must hold a JSON list of examples"),
        ("a.jsonl", b'{"question": "a", "answer": "b"}\n', "line 1 of .* has the fields question, answer"),
        ("a.jsonl", b'{"messages": []}\n', "has no messages: it must be a list of turns"),
        ("a.jsonl", b'{"messages": [{"role": "king", "content": "a"}]}\n', "has 'king' as role of turn 1"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "has no turn of the assistant"),
        ("a.jsonl", b'{"instruction": "%s", "output": "b"}\n' % (b"a" * 99), "no answer of .* begins within 64 tokens"),
        ("a.parquet", b"PAR1", "save the data as JSONL"),
    ],
)
def test_wrong_files_are_one_sentence(
    built: Built, bytes_tokenizer: Any, tmp_path: Path, cache: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        built(DataSpec(path=str(tmp_path / name), sequence=64), bytes_tokenizer)
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*/manifest.json"))
    assert not list(cache.glob(".building-*"))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (DataSpec(path="no/such.jsonl"), "there is no file or folder no/such.jsonl"),
        (DataSpec(path="alpaca"), "a data set of the Hub has to be downloaded first"),
        (
            DataSpec(path="shipped:songs"),
            "there is no data shipped:songs: there are shipped:text and shipped:dialogues",
        ),
        (DataSpec(path="shipped:text", format="csv"), "there is no data format 'csv'"),
        (DataSpec(path="shipped:text", ablation="x"), "the ablation 'x' needs a recipe"),
        (DataSpec(path="shipped:text", packing=True, model_type="mamba"), "use --scan tightfit"),
        (DataSpec(path="shipped:text", packing=True, model_type="mamba", scan="official"), "use --scan tightfit"),
        (DataSpec(path="shipped:text", packing=True, model_type="falcon_mamba", scan="torch"), "use --scan tightfit"),
        (DataSpec(path="shipped:text", packing=True, model_type="mamba2", scan="tightfit"), ": leave data.packing out"),
        (DataSpec(path="shipped:text", packing=True, model_type="jamba"), ": leave data.packing out"),
        (DataSpec(path="shipped:text", sequence=1), "nothing to predict"),
    ],
)
def test_wrong_jobs_are_one_sentence(built: Built, bytes_tokenizer: Any, spec: DataSpec, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        built(spec, bytes_tokenizer)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_our_scan_takes_packed_rows(built: Built, bytes_tokenizer: Any, model_type: str) -> None:
    spec = DataSpec(path="shipped:text", sequence=64, packing=True, model_type=model_type, scan="tightfit")
    assert built(spec, bytes_tokenizer).train.packed


def test_an_empty_folder(built: Built, bytes_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no \.txt, \.jsonl or \.json files"):
        built(DataSpec(path=str(tmp_path / "empty")), bytes_tokenizer)


def test_lists_longer_than_the_buffer_come_item_by_item(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    items = [{"text": "x" * (3_000_000 if at == 2 else 10)} for at in range(6)] + [7, "]", [1, {"a": "[,]"}]]
    path.write_text(json.dumps(items, indent=1), encoding="utf-8")
    assert list(array_items(path)) == items
    assert [name for name, _ in trees_in(SourceFile(path=path, kind="array"))][-1] == Message("data.example", number=9)
