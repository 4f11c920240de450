"""Files as users have them: whose they are, on which line a thing stands, and what cannot be read."""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.cli.lint import lint as lint_verb
from tightfit.formats.deepspeed.keys import KEYS
from tightfit.formats.dialect import kinds
from tightfit.formats.document import read_document
from tightfit.formats.lint import examine, lint
from tightfit.formats.target import Target
from tightfit.types import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "lint.md"


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def run(*words: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = lint_verb(words)
    return code, printed.getvalue()


# --- whose file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '{"zero_optimisation": {"stage": 3}}', "deepspeed"),
        ("a.json", '{"bf16": {"enabled": true}, "train_batch_size": 8}', "deepspeed"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {}", "accelerate"),
        ("a.yaml", "model_name_or_path: x\ntemplate: qwen\ndeepspeed: z.json", "llamafactory"),
        ("a.json", '{"output_dir": "x", "fp16": true, "max_seq_length": 1024}', "huggingface"),
        ("a.yaml", "learning_rate: 1.0e-4\nnum_train_epochs: 3", "huggingface"),
        ("a.yaml", "model: 7b_mamba\nmethod: full\nhardware: {gpus: 6x32GB}", "job"),
        ("a.yaml", "model_type: mamba\nnum_gpus: 4\nmodel: {d_model: 64}\ntraining: {batch_size: 1}", "job"),
    ],
)
def test_the_keys_tell_whose_file_it_is(tmp_path: Path, name: str, text: str, kind: str) -> None:
    assert examine(file(tmp_path, name, text)).kind == kind


def test_a_file_that_could_be_anybodys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --kind deepspeed, accelerate"):
        lint(file(tmp_path, "a.yaml", "apples: 1"))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"a": 1,, "b"', "is not JSON: take out the second comma, in line 1"),
        ("a.json", "[1, 2]", "holds no keys"),
        ("a.json", "fp16: 1e400", "is not JSON"),
        ("a.yaml", "a: b: c", "is not YAML: put text with a colon in it in quotes.*, in line 1"),
        ("a.yaml", "", "holds no keys"),
        ("a.yaml", "1: 2", "is not a key"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {1: 2}", "^1 in fsdp_config in a.yaml is not a key"),
        ("a.yaml", "fp16: true\na: {b: [{null: 2}]}", "^null in a.b in a.yaml is not a key"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        lint(file(tmp_path, name, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        lint(tmp_path / "none.json")


# --- lines --------------------------------------------------------------------------------------


def test_lines_of_json_with_tabs_comments_and_bare_words(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "a.json",
        """
        {
        \t// a comment: "with": {"keys": 1}
        \t"zero_optimization": {"stage": 2,
        \t\t"offload_param": {  /* two
        \t\t\tlines */ "device": "cpu"
        \t\t}
        \t},
        \tlist: [{"inner": 1}, "x"]  # another
        \tsteps_per_print: 10
        \t"text": "a \\" quote and a { brace"
        \t"last": 1
        }
        """,
    )
    lines = read_document(path).lines
    assert lines == {
        "zero_optimization": 3,
        "zero_optimization.stage": 3,
        "zero_optimization.offload_param": 4,
        "zero_optimization.offload_param.device": 5,
        "list": 8,
        "steps_per_print": 9,
        "text": 10,
        "last": 11,
    }


def test_lines_of_yaml(tmp_path: Path) -> None:
    path = file(tmp_path, "a.yaml", "# first\na: 1\nb:\n  c: 'x'\n  d: {e: 2}\n")
    document = read_document(path)
    assert document.lines == {"a": 2, "b": 3, "b.c": 4, "b.d": 5, "b.d.e": 5}
    assert document.quoted == {"b.c"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc.{}:\"'#/ ", min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.thorough
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=6), JSON, min_size=1, max_size=5))
def test_the_scanner_finds_every_key_of_plain_json(tmp_path_factory: pytest.TempPathFactory, values: object) -> None:
    assert isinstance(values, dict)
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    document = read_document(path)
    text = path.read_text(encoding="utf-8").splitlines()
    for key in values:
        assert json.dumps(key) in text[document.lines[key] - 1]


def test_findings_come_by_line_and_name_their_file(tmp_path: Path) -> None:
    file(tmp_path, "ds.json", '{"train_micro_batch_size_per_gpu": "auto",\n"zero_optimization": {"stag": 3}}')
    path = file(
        tmp_path,
        "train.yaml",
        """
        model_name_or_path: Qwen/Qwen3-4B
        do_train: true
        dataset: x
        template: qwenn3
        deepspeed: ds.json
        cutof_len: 12
        """,
    )
    errors = [(found.file, found.line, found.rule) for found in lint(path) if found.severity == "error"]
    assert errors == [
        (str(path), 4, "lf-template"),
        (str(path), 6, "lf-unknown"),
        (str(tmp_path / "ds.json"), 2, "ds-refused-key"),
    ]


def test_files_are_named_by_their_way_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    file(tmp_path, "cache/ds.json", '{"train_micro_batch_size_per_gpu": "auto",\n"zero_optimization": {"stag": 3}}')
    file(tmp_path, "cache/arguments.json", '{"output_dir": "x", "deepspeed": "ds.json"}')
    monkeypatch.chdir(tmp_path)
    code, text = run("cache/arguments.json")
    assert code == 1
    assert text.splitlines()[0] == "cache/ds.json:2  zero_optimization.stag  error [ds-refused-key]"
    assert text.splitlines()[-1].startswith("cache/arguments.json (huggingface): 1 error")
    monkeypatch.chdir(tmp_path / "cache")
    assert run("../cache/arguments.json")[1].startswith("ds.json:2 ")


@pytest.mark.parametrize(
    ("beside", "what", "fix"),
    [
        (None, "'zero3.json' is neither in this folder nor beside", "write its path as seen from"),
        ("zero_3.json", "'zero3.json' is neither in this folder nor beside", "write zero_3.json"),
        (
            "zero3.json",
            "zero3.json is not JSON: the training cannot start",
            "close the bracket that is open, in line 1",
        ),
    ],
)
def test_a_deepspeed_file_that_is_not_there(tmp_path: Path, beside: str | None, what: str, fix: str) -> None:
    path = file(tmp_path, "a.yaml", "output_dir: x\nlearning_rate: 1.0e-4\ndeepspeed: zero3.json")
    if beside is not None:
        file(tmp_path, beside, '{"a": 1')
    (found,) = lint(path)
    assert (found.rule, found.severity, found.line) == ("pair-missing", "error", 3)
    assert str(found.what).startswith(what)
    assert str(found.fix).startswith(fix)
    assert run(str(path))[0] == 1


def test_a_block_of_deepspeed_inside_the_trainers_file(tmp_path: Path) -> None:
    path = file(tmp_path, "a.json", '{"output_dir": "x",\n"deepspeed": {\n"zero_optimisation": {}}}')
    (found,) = [found for found in lint(path) if found.rule == "ds-typo"]
    assert (found.place, found.line, found.file) == ("deepspeed.zero_optimisation", 3, str(path))


def test_a_json_file_for_llamafactory(tmp_path: Path) -> None:
    path = file(tmp_path, "a.json", '{"model_name_or_path": "x", "template": "qwen", "finetuning_type": "lora"}')
    assert [found.rule for found in lint(path)] == ["lf-json-file"]
    assert lint(path, Target(llamafactory_version="0.9.4")) == ()


# --- the verb -----------------------------------------------------------------------------------


def test_the_verb_prints_a_block_a_finding_and_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, "ds.json", '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 3}\n}')
    monkeypatch.chdir(tmp_path)
    code, text = run("ds.json")
    assert code == 1
    assert text.splitlines()[:4] == [
        "ds.json:3  zero_optimisation  error [ds-typo]",
        "  DeepSpeed knows no zero_optimisation at the top level and ignores it without a",
        "  word.",
        "  Fix: write zero_optimization.",
    ]
    assert text.splitlines()[-1] == "ds.json (deepspeed): 1 error, no warnings, 2 notes"


def test_the_verb_for_programs(tmp_path: Path) -> None:
    path = file(tmp_path, "ds.json", '{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1}')
    code, text = run(str(path), "--json", "--world", "8", "--kind", "deepspeed")
    report = json.loads(text)
    assert code == 1
    assert (report["file"], report["kind"], report["errors"], report["warnings"]) == (str(path), "deepspeed", 1, 0)
    (error,) = [found for found in report["findings"] if found["severity"] == "error"]
    assert error["rule"] == "ds-batch"
    assert error["place"] == "train_batch_size"
    assert error["line"] == 1


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    path = file(tmp_path, "ds.json", '{"train_batch_size": 8, "my_own": 1}')
    assert run(str(path))[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kind", "axolotl"], "--kind knows no 'axolotl'"),
        (["--world", "0"], "--world takes at least 1"),
        (["--deepspeed-version", "new"], "--deepspeed-version takes a version such as"),
        (["--strict"], "has no flag --strict"),
    ],
)
def test_flags_that_are_wrong(tmp_path: Path, words: list[str], sentence: str) -> None:
    path = file(tmp_path, "ds.json", '{"train_batch_size": 8}')
    with pytest.raises(ConfigError, match=sentence):
        run(str(path), *words)


# --- the docs -----------------------------------------------------------------------------------


def test_the_docs_list_every_rule() -> None:
    severities = {rule: severity for dialect in kinds().values() for rule, severity in dialect.rules.items()}
    wanted = {
        (f"`{rule}`", ", ".join(name for name, dialect in kinds().items() if rule in dialect.rules), severity)
        for rule, severity in severities.items()
    }
    for docs in (DOCS, DOCS.parent / "zh" / DOCS.name):
        table = docs.read_text(encoding="utf-8").rpartition("|---|---|---|---|\n")[2].partition("\n\n")[0]
        rows = [row.strip("| ").split(" | ", 3) for row in table.splitlines()]
        assert {tuple(row[:3]) for row in rows} == wanted
        assert len(rows) == len(wanted)
        assert all(finds.strip() for *_, finds in rows)
        assert docs != DOCS or len({finds for *_, finds in rows}) >= len(rows) - 1


# --- anything at all ----------------------------------------------------------------------------

WORDS = sorted(
    {key for dialect in kinds().values() for key in dialect.keys}
    | KEYS["zero_optimization"]
    | {"device", "nvme_path", "type", "params", "enabled", "lr", "fsdp_version", "zero_stage", "deepspeed_config_file"}
)
ANYTHING = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, 3, -1, 1e300, 10**400, "auto", "1e-4", "false", "cpu", "nvme", "", "AdamW"]
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.thorough
@given(st.dictionaries(st.sampled_from(WORDS), ANYTHING, min_size=1, max_size=6), st.sampled_from(list(kinds())))
def test_any_file_is_checked_or_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], kind: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    try:
        sentences = [f"{found.what} {found.fix}" for found in lint(path, kind=kind, world=4)]
    except ConfigError as error:
        sentences = [str(error)]
    assert not any("\n" in sentence for sentence in sentences)
