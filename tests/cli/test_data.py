"""`tightfit data preview` as a user meets it: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm_desk

pytestmark = pytest.mark.thorough


def preview(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    return warm_desk.run("data", "preview", *words, cwd=cwd, env=env, ranks=True)


def shown(*words: str, cwd: Path | None = None) -> str:
    done = preview(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def answer(*words: str, cwd: Path | None = None) -> Any:
    return json.loads(shown(*words, "--json", cwd=cwd))


def refused(*words: str, cwd: Path | None = None) -> str:
    done = preview(*words, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip().removeprefix("tightfit: ")


def test_examples_stand_with_their_loss_in_brackets() -> None:
    out = shown("--data", "shipped:dialogues", "--count", "1")
    assert "⟦Ten more minutes, Otto. You walk faster every week.<|im_end|>⟧" in out
    assert "Tokens by section: profile 155, scene 34, context 63." in out
    assert "\x1b" not in out
    for arm in ("everything", "no_profile", "wrong_profile", "context_only"):
        assert f"\n{arm} " in out


def test_one_ablation_with_what_was_lost() -> None:
    out = answer("--recipe", "shipped:persona", "--ablation", "profile_and_history", "--seq", "300", "--count", "40")
    assert [each["ablation"] for each in out["summaries"]] == ["profile_and_history"]
    assert len(out["examples"]) == 40
    lost = {each["field"]: each["lost"] for each in out["summaries"][0]["sections"]}
    assert set(lost) == {"profile", "history"}
    assert lost["history"] > 0
    assert all(example["tokens"] <= 300 for example in out["examples"])
    learned = [piece["text"] for piece in out["examples"][0]["pieces"] if piece["loss"]]
    assert learned == ["Ten more minutes, Otto. You walk faster every week.<|im_end|>"]


def test_a_job_file_with_its_data_beside_it(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.jsonl").write_text(
        '{"instruction": "Say yes.", "output": "Yes."}\n' * 3, encoding="utf-8"
    )
    job = tmp_path / "here" / "job.yaml"
    job.write_text("model: tiny_llama\nsequence: 64\ndata:\n  path: own.jsonl\n  template: gemma\n", encoding="utf-8")
    out = answer(str(job), cwd=tmp_path)
    assert out["head"]["sequence"] == 64
    assert out["head"]["template"] == "gemma"
    assert out["summaries"][0]["examples"] == 3
    assert answer(str(job), "--template", "chatml", cwd=tmp_path)["head"]["template"] == "chatml"


def test_text_and_what_was_cut(tmp_path: Path) -> None:
    assert answer("--data", "shipped:text", "--seq", "128")["summaries"][0]["samples"] == 598
    long = {"instruction": "Say it.", "output": "yes " * 100}
    (tmp_path / "a.jsonl").write_text(json.dumps(long) + "\n", encoding="utf-8")
    assert ": 128 tokens, 102 learned, 300 cut off\n" in shown("--data", str(tmp_path / "a.jsonl"), "--seq", "128")


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    good = '{"text": "a"}\n'
    (tmp_path / "a.jsonl").write_text(good * 16 + "{\n", encoding="utf-8")
    assert refused("--data", "a.jsonl", cwd=tmp_path).startswith("line 17 of a.jsonl is not JSON")
    assert "there is no file or folder b.jsonl" in refused("--data", "b.jsonl", cwd=tmp_path)
    assert "there is nothing to preview" in refused("--model", "tiny_llama")
    assert "--count must be from 0 to 1000" in refused("--data", "shipped:text", "--count", "-1")
    assert "has no ablation 'x'" in refused("--recipe", "shipped:persona", "--ablation", "x")
    assert "--format knows no 'csv'; it takes auto" in refused("--data", "shipped:text", "--format", "csv")
    assert "has no flag --tokeniser: did you mean --tokenizer?" in refused("--tokeniser", "x")


def test_the_verb_alone_helps_and_a_wrong_word_is_named() -> None:
    alone = warm_desk.run("data")
    assert alone.returncode == 0
    assert "example:\n  tightfit data preview" in alone.stdout
    wrong = warm_desk.run("data", "preveiw")
    assert wrong.returncode == 2
    assert wrong.stderr == "tightfit: tightfit data has no 'preveiw': did you mean preview?\n"


def test_without_the_training_packages_it_says_what_to_install() -> None:
    script = (
        "import sys\nimport tightfit.cli.data as desk\nfrom tightfit.cli import main\n"
        "desk.find_spec = lambda name: None\nsys.exit(main(['data', 'preview', '--data', 'shipped:text']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tightfit: a preview needs the training packages: pip install 'tightfit[train]'\n"
