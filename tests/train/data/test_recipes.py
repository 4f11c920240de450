"""Recipes: prompts from fields, ablations over the same answers, people held back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from stories import text as stories_text

from tightfit.messages import Message
from tightfit.train.data.chat import SHIPPED
from tightfit.train.data.recipes import read_recipe, resolve
from tightfit.train.data.samples import IGNORED, Samples, Split, explain
from tightfit.train.data.spec import DataSpec
from tightfit.types import ConfigError

Built = Callable[..., Split]
Counted = Callable[..., dict[str, Any]]
Lines = Callable[..., str]

PERSONA = DataSpec(recipe="shipped:persona", sequence=1024)


def prompts(samples: Samples, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(samples[at].ids) for at in range(len(samples))]


def answers(samples: Samples, tokenizer: Any) -> list[str]:
    return [tokenizer.decode([each for each in samples[at].labels if each != IGNORED]) for at in range(len(samples))]


def recipe(folder: Path, **changed: Any) -> str:
    tree = yaml.safe_load((SHIPPED / "persona.yaml").read_text(encoding="utf-8"))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**tree, **changed}, sort_keys=False), encoding="utf-8")
    return str(path)


# --- what ships -----------------------------------------------------------------------------------


def test_the_shipped_text_is_what_its_script_writes() -> None:
    assert (SHIPPED / "stories.txt").read_text(encoding="utf-8") == stories_text()
    assert 60_000 < (SHIPPED / "stories.txt").stat().st_size < 100_000


def test_the_shipped_dialogues() -> None:
    tree = json.loads((SHIPPED / "dialogues.json").read_text(encoding="utf-8"))
    assert len(tree["dialogues"]) == 40
    for each in tree["dialogues"]:
        assert len(each["people"]) == 2 <= len(each["turns"])
        assert all(tree["people"][who]["profile"] for who in each["people"])
    records = list(resolve(PERSONA).records())
    assert len(records) == sum(len(each["turns"]) - 1 for each in tree["dialogues"])
    assert sum(bool(record["fields"]["history"]) for record in records) > len(records) / 2


@pytest.mark.thorough
def test_the_dialogues_by_their_own_name_use_the_shipped_recipe(kept: Built, bytes_tokenizer: Any) -> None:
    by_path = kept(DataSpec(path="shipped:dialogues", sequence=1024), bytes_tokenizer).train
    assert by_path.fingerprint == kept(PERSONA, bytes_tokenizer).train.fingerprint


# --- ablations ------------------------------------------------------------------------------------

ARMS = (
    None,
    "no_profile",
    "wrong_profile",
    "context_only",
    "profile_and_history",
    "profile_and_context",
    "profile_and_history_and_context",
)


@pytest.mark.thorough
def test_an_ablation_of_the_shipped_dialogues_is_one_of_the_shipped_recipe(kept: Built, bytes_tokenizer: Any) -> None:
    short = DataSpec(path="shipped:dialogues", ablation="profile_and_history", sequence=1024)
    spelt_out = DataSpec(recipe="shipped:persona", ablation="profile_and_history", sequence=1024)
    assert kept(short, bytes_tokenizer).train.fingerprint == kept(spelt_out, bytes_tokenizer).train.fingerprint


@pytest.mark.thorough
def test_ablations_change_prompts_and_nothing_else(kept: Built, counted: Counted, bytes_tokenizer: Any) -> None:
    arms = {}
    for name in ARMS:
        split = kept(replace(PERSONA, ablation=name, evaluation_split=0.1), bytes_tokenizer)
        assert split.held is not None
        arms[name] = (split.train, split.held)
    first = [answers(part, bytes_tokenizer) for part in arms[None]]
    assert all([answers(part, bytes_tokenizer) for part in parts] == first for parts in arms.values())
    assert len({tuple(prompts(train, bytes_tokenizer)) for train, _ in arms.values()}) == len(ARMS)
    assert len({counted(replace(PERSONA, ablation=name), bytes_tokenizer)["targets"] for name in ARMS}) == 1


@pytest.mark.thorough
def test_what_each_ablation_shows(kept: Built, bytes_tokenizer: Any) -> None:
    def second(name: str | None) -> str:
        return prompts(kept(replace(PERSONA, ablation=name), bytes_tokenizer).train, bytes_tokenizer)[5]

    whole = second(None)
    assert "You are Mara, talking to Lin.\nI bake bread" in whole
    assert "You said on other days:\n" in whole
    assert "Now: Late morning" in whole
    assert "I bake bread" not in second("no_profile")
    wrong = second("wrong_profile")
    assert "I bake bread" not in wrong
    assert "You are Mara, talking to Lin.\nI " in wrong
    assert "Now:" not in second("profile_and_history_and_context")
    assert "You said on other days" not in second("profile_and_context")
    assert "Lin: " not in second("profile_and_history").split("<|im_start|>user")[1]


def test_a_wrong_profile_is_that_of_other_people() -> None:
    right = list(resolve(PERSONA).records())
    wrong = list(resolve(replace(PERSONA, ablation="wrong_profile")).records())
    people = json.loads((SHIPPED / "dialogues.json").read_text(encoding="utf-8"))["people"]
    by_profile = {tuple(each["profile"]): each["name"] for each in people.values()}
    for one, other in zip(right, wrong, strict=True):
        assert by_profile[tuple(other["fields"]["profile"])] not in (one["speaker"], one["partner"])
        assert {**one["fields"], "profile": 0} == {**other["fields"], "profile": 0}


@pytest.mark.thorough
def test_arms_with_other_answers_are_refused(built: Built, bytes_tokenizer: Any, cache: Path) -> None:
    built(PERSONA, bytes_tokenizer)
    (path,) = cache.glob("arms-*.json")
    path.write_text(json.dumps({"everything": "another hash"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="no_profile has other answers than everything"):
        built(replace(PERSONA, ablation="no_profile"), bytes_tokenizer)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("sequence", [200, 260, 400])
def test_prompts_give_way_and_answers_stay(kept: Built, counted: Counted, bytes_tokenizer: Any, sequence: int) -> None:
    whole = answers(kept(PERSONA, bytes_tokenizer).train, bytes_tokenizer)
    spec = replace(PERSONA, sequence=sequence)
    train = kept(spec, bytes_tokenizer).train
    assert train.lengths.max() <= sequence
    assert answers(train, bytes_tokenizer) == whole
    counts = counted(spec, bytes_tokenizer)
    assert counts["cut"] == counts["skipped"] == 0
    lost = {each["field"]: each["lost"] / (each["lost"] + each["tokens"]) for each in counts["sections"]}
    assert lost["history"] >= lost["scene"] >= lost["profile"] >= lost["context"]
    assert lost["history"] > lost["context"]


@pytest.mark.thorough
def test_answers_too_long_are_cut_alike_in_every_arm(kept: Built, counted: Counted, bytes_tokenizer: Any) -> None:
    assert ARMS[0] is None
    short = replace(PERSONA, sequence=110)
    cut = [kept(replace(short, ablation=name), bytes_tokenizer).train for name in ARMS]
    count = counted(short, bytes_tokenizer)["cut"]
    assert count > 0
    assert len({tuple(answers(train, bytes_tokenizer)) for train in cut}) == 1
    short = replace(short, overlong="skip")
    skipped = [kept(replace(short, ablation=name), bytes_tokenizer).train for name in ARMS[::3]]
    assert counted(short, bytes_tokenizer)["skipped"] == count
    assert len({tuple(answers(train, bytes_tokenizer)) for train in skipped}) == 1


def test_a_budget_keeps_the_newest_lines_and_the_beginning_of_a_text(
    built: Built, words_tokenizer: Any, tmp_path: Path, lines: Lines
) -> None:
    source = lines({"log": ["oldest line", "older line", "newest line"], "note": "one two three four", "out": "done"})
    sections = [{"field": "log", "budget_tokens": 12}, {"field": "note", "budget_tokens": 6}]
    path = recipe(tmp_path, source=source, target="out", sections=sections, ablations={})
    (prompt,) = prompts(built(DataSpec(recipe=path, sequence=128), words_tokenizer).train, words_tokenizer)
    assert "newest line" in prompt
    assert "oldest line" not in prompt
    assert "one" in prompt
    assert "four" not in prompt
    assert prompt.endswith("Assistant: done</s>\n")


@pytest.mark.thorough
def test_gemma_takes_every_prompt(kept: Built, words_tokenizer: Any) -> None:
    spec = replace(PERSONA, template="gemma", ablation="profile_and_history", sequence=600)
    first, *_ = prompts(kept(spec, words_tokenizer).train, words_tokenizer)
    assert first.startswith("<s><start_of_turn>user\nYou are Mara, talking to Otto.\nI bake bread")


# --- people held back -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_nobody_who_is_held_back_is_trained_on(built: Built, bytes_tokenizer: Any, cache: Path) -> None:
    spec = replace(PERSONA, evaluation_split=0.15)
    split = built(spec, bytes_tokenizer)
    assert split.held is not None
    names = {
        each["name"] for each in json.loads((SHIPPED / "dialogues.json").read_text(encoding="utf-8"))["people"].values()
    }
    held = {text.split("You are ")[1].split(",")[0] for text in prompts(split.held, bytes_tokenizer)}
    assert 3 <= len(held) <= 4
    assert held < names
    for text in prompts(split.train, bytes_tokenizer):
        speaker, partner = text.split("You are ")[1].split(".")[0].split(", talking to ")
        assert not held & {speaker, partner}
    (view,) = cache.glob("*/views/*/manifest.json")
    left_out = json.loads(view.read_text(encoding="utf-8"))["left_out"]
    assert len(split.train) + len(split.held) + left_out == len(built(PERSONA, bytes_tokenizer).train)


# --- other sources --------------------------------------------------------------------------------


def real_persona_chat(folder: Path) -> Path:
    """Two dialogues in RealPersonaChat's layout."""
    (folder / "dialogues").mkdir(parents=True)
    people = {
        who: {"persona": [f"私は{who}です。", "猫が好きです。"], "personality": {"BigFive_Openness": value, "IOS": 3}}
        for who, value in (("AA", 2.5), ("BB", 5.5), ("CC", 4.0))
    }
    (folder / "interlocutors.json").write_text(json.dumps(people), encoding="utf-8")
    for number, pair in enumerate((("AA", "BB"), ("CC", "AA")), start=1):
        tree = {
            "dialogue_id": number,
            "interlocutors": list(pair),
            "utterances": [
                {"utterance_id": at, "interlocutor_id": pair[at % 2], "text": f"発話{number}-{at}", "timestamp": "NaT"}
                for at in range(5)
            ],
            "evaluations": [],
        }
        (folder / "dialogues" / f"{number:05d}.json").write_text(json.dumps(tree), encoding="utf-8")
    return folder


def test_real_persona_chat_with_its_notice(built: Built, bytes_tokenizer: Any, tmp_path: Path) -> None:
    folder = real_persona_chat(tmp_path / "rpc")
    spec = replace(PERSONA, path=str(folder))
    train = built(spec, bytes_tokenizer).train
    assert answers(train, bytes_tokenizer) == [f"発話{n}-{at}<|im_end|>" for n in (1, 2) for at in (1, 2, 3, 4)]
    records = list(resolve(spec).records())
    assert records[0]["fields"]["profile"] == ["私はBBです。", "猫が好きです。"]
    assert records[0]["fields"]["traits"] == ["openness: high"]
    assert records[4]["fields"]["history"] == ["発話1-0", "発話1-2", "発話1-4"]
    assert Message("data.persona-licence") in explain(spec, bytes_tokenizer)
    assert not explain(PERSONA, bytes_tokenizer)


def test_whose_turns_are_learned(tmp_path: Path) -> None:
    spec = DataSpec(path=str(real_persona_chat(tmp_path / "rpc")), recipe=recipe(tmp_path, answers="first"))
    assert [record["target"] for record in resolve(spec).records()] == ["発話1-2", "発話1-4", "発話2-2", "発話2-4"]


def test_a_file_of_ones_own_lies_beside_its_recipe(
    built: Built, bytes_tokenizer: Any, tmp_path: Path, lines: Lines
) -> None:
    lines(
        {"bio": "I sail.", "who": "ann", "n": 3, "say": "Ahoy."},
        {"bio": "I farm.", "who": "bob", "n": None, "say": "Moo."},
        name="own.jsonl",
    )
    sections = [{"field": "bio", "role": "system"}, {"field": "n", "template": "Count: {text}"}]
    path = recipe(
        tmp_path,
        source="own.jsonl",
        target="say",
        speaker="who",
        sections=sections,
        ablations={"x": {"bio": "shuffled"}},
    )
    split = built(DataSpec(recipe=path, sequence=128, evaluation_split=0.5), bytes_tokenizer)
    assert split.held is not None
    assert len(split.train) == len(split.held) == 1
    shuffled = list(resolve(DataSpec(recipe=path, ablation="x")).records())
    assert [record["fields"]["bio"] for record in shuffled] == ["I farm.", "I sail."]


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"sections": [{"field": "profil"}], "ablations": {}}, "names the field 'profil', .*: did you mean profile"),
        ({"sections": []}, "sections in recipe.yaml must be a list"),
        ({"sections": [{"field": "profile", "rol": "user"}]}, "unknown key 'rol' in section 1 of recipe.yaml"),
        ({"sections": [{"field": "profile", "role": "king"}]}, "role in section 1 .* must be system or user"),
        ({"sections": [{"field": "profile", "template": "x"}]}, r"must hold \{text\}"),
        ({"sections": [{"field": "profile", "budget_tokens": 0}]}, "budget_tokens in section 1 .* at least 1, not 0"),
        ({"sections": [{"field": "profile"}] * 2}, "has profile twice"),
        ({"ablations": {"a": {"mood": "off"}}}, "the ablation a in recipe.yaml names the field 'mood'"),
        ({"ablations": {"a": {"profile": "half"}}}, "must be on, off or shuffled, not 'half'"),
        ({"target": "answer"}, "target 'answer' is no field of the dialogues"),
        ({"sectoins": []}, "unknown key 'sectoins' in recipe.yaml; did you mean 'sections'"),
        ({"answers": "third"}, "answers in recipe.yaml must be first, second or both"),
        ({"source": "nowhere"}, "there is no source nowhere"),
    ],
)
def test_wrong_recipes_are_one_sentence(tmp_path: Path, changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(DataSpec(recipe=recipe(tmp_path, **changed)))


@pytest.mark.parametrize(
    ("ablation", "sentence"),
    [
        ("no_profil", "has no ablation 'no_profil': did you mean no_profile"),
        ("profile_and_mood", "names the field 'mood', which no example has"),
        ("zzz", "there are no_profile, wrong_profile, context_only, everything"),
    ],
)
def test_wrong_ablations_are_one_sentence(ablation: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(replace(PERSONA, ablation=ablation))


def test_wrong_sources_are_one_sentence(built: Built, bytes_tokenizer: Any, tmp_path: Path, lines: Lines) -> None:
    source = lines({"bio": "a", "say": "b"}, {"bio": "a"})
    path = recipe(tmp_path, source=source, target="say", sections=[{"field": "bio"}], ablations={})
    with pytest.raises(ConfigError, match=r"line 2 of .* has no say, which is the recipe's target"):
        built(DataSpec(recipe=path, sequence=64), bytes_tokenizer)
    alone = lines({"bio": "a", "say": "b"}, name="alone.jsonl")
    path = recipe(
        tmp_path, source=alone, target="say", sections=[{"field": "bio"}], ablations={"x": {"bio": "shuffled"}}
    )
    with pytest.raises(ConfigError, match="can be shuffled: there are no dialogues of other people"):
        built(DataSpec(recipe=path, sequence=64, ablation="x"), bytes_tokenizer)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"it needs interlocutors.json and dialogues/\*.json"):
        resolve(replace(PERSONA, path=str(tmp_path / "folder")))
    with pytest.raises(ConfigError, match=r"there is no recipe none.yaml: name a YAML file, or shipped:persona"):
        read_recipe("none.yaml")
    (tmp_path / "torn.yaml").write_text("sections: [\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the recipe torn.yaml is not YAML at line 2"):
        read_recipe(str(tmp_path / "torn.yaml"))


def test_the_page_shows_the_shipped_recipe() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    shown = page.split("`persona.yaml`:\n\n```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(shown) == yaml.safe_load((SHIPPED / "persona.yaml").read_text(encoding="utf-8"))
