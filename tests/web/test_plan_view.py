"""The Plan view over HTTP: the same answers as the command line, whole without a script, alive whatever is asked."""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import subprocess
import sys
import time
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, client

from tightfit.cli import main
from tightfit.hardware.catalogue import CARDS
from tightfit.hardware.words import parse_hardware
from tightfit.model.presets import PRESETS
from tightfit.web.plan_answer import answer_to, card_word, guessed, read_address
from tightfit.web.plan_drawing import draw
from tightfit.web.plan_view import STATIC
from tightfit.web.words import words

pytestmark = pytest.mark.thorough

FITS = "model=1b_mamba&gpus=2&card=24GB&host-ram=64GB&seq=1024"
TIGHT = "model=1b_mamba&gpus=1&card=8GB&host-ram=8GB&engine=zero2"
CONFIG = json.dumps(dict(PRESETS["tiny_llama"].config))


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return client(tmp_path_factory.mktemp("root"))


def said_by_the_command(query: str, capsys: pytest.CaptureFixture[str], **instead: str) -> dict[str, Any]:
    command = shlex.split(read_address(parse_qsl(query)).command())
    command = [instead.get(word.partition(".")[0], word) for word in command]
    assert main([*command[1:], "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def without_time(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "search_s"}


@pytest.mark.parametrize(
    "query",
    [
        FITS,
        TIGHT,
        pytest.param("model=qwen2.5-7b&gpus=1&card=16GB&host-ram=32GB", marks=pytest.mark.slow),
        "model=7b_mamba&gpus=2x4x32GB&host-ram=128GB&micro-batch=2&max-steps=500",
        "model=llama-3.1-8b&gpus=2&card=RTX4090&method=qlora&lora-rank=16&seq=4096&margin=10%25",
        "model=qwen2.5-7b&gpus=2&card=24GB&host-ram=64GB&engine=zero2&allow=lora",
        "model=tiny_mamba&card=this&precision=fp32&effective-batch=8",
    ],
)
def test_the_page_and_the_command_line_answer_alike(
    query: str, visitor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = visitor.get(f"/plan/answer.json?{query}")
    assert page.status_code == 200
    assert without_time(page.json()) == without_time(said_by_the_command(query, capsys))


def test_a_pasted_config_and_its_file_are_answered_alike(
    visitor: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    query = f"config={CONFIG}&gpus=2&card=24GB&host-ram=64GB"
    page = visitor.get("/plan/answer.json", params=dict(parse_qsl(query))).json()
    line = said_by_the_command(query, capsys, config=str(tmp_path / "config.json"))
    for each in (page, line):  # only the name differs: a paste has none
        each["model"].pop("name")
        for way in (each["chosen"], *each["alternatives"]):
            way.pop("model")
    assert without_time(page) == without_time(line)


class Reader(HTMLParser):
    """What is in a page: its ids, its links, and whether every element is closed."""

    VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.styles: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        self.styles += ["style"] if "style" in given else []
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another element"


@pytest.mark.parametrize("query", [FITS, TIGHT])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_whole_without_a_script(query: str, language: str, visitor: Any) -> None:
    text = visitor.get(f"/plan?{query}&lang={language}").text
    read = Reader(text)
    ours = [each for each in read.ids if not each.startswith("key-")]
    assert len(set(ours)) == len(ours), "an id stands twice"
    assert read.styles == []
    assert '<table class="heat">' in text
    assert 'class="phase-table"' in text
    assert "tightfit plan" in text
    assert ("worker.json" in text) is (query == FITS)
    assert ("allow=lora" in text) is (query == TIGHT), "what would make it fit"
    wrong = {"en": "未", "zh": "Needs "}[language]
    assert wrong not in text.partition('<section id="files"')[0]


def card_of(page: str) -> str:
    """The words of the card."""
    card = page.partition('id="verdict"')[2].partition(">")[2].partition('<p id="said"')[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", card)).split())


def test_the_card_says_what_the_plan_says(visitor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    query = f"{FITS}&max-steps=1000"
    report = said_by_the_command(query, capsys)
    chosen, pace = report["chosen"], report["chosen"]["pace"]
    gpu, host = chosen["footprint"]["gpu"], chosen["footprint"]["host"]
    needs, spare = gpu["required_bytes"] / 2**30, 24 - gpu["required_bytes"] / 2**30
    card = card_of(visitor.get(f"/plan?{query}&lang=en").text)
    for said in (
        f"✓ Fits {chosen['strategy']} needs {needs:.1f} of 24.0 GiB on each of 2 GPUs.",
        f"free per GPU {spare:.1f} GiB {spare / 24:.0%}",
        f"RAM per node {host['peak_bytes_per_node'] / 2**30:.1f} / 64.0 GiB",
        f"tokens per second {pace['tokens_per_s']:,.0f} ",
        f"seconds per step {pace['step_s']:.2f} s {pace['low_s']:.2f}–{pace['high_s']:.2f}",
        f"to finish {report['hours'] * 60:.0f} minutes",
    ):
        assert said in card
    unsaid = visitor.get(f"/plan?{FITS}&lang=en").text
    assert '<a class="how-long" href="#max-steps">how many steps?</a>' in unsaid


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (TIGHT, "✗ Does not fit: not enough GPU memory"),
        ("model=qwen2.5-7b&gpus=1&card=80GB&host-ram=16GB&engine=zero3&offload-optimizer=cpu", "not enough RAM"),
    ],
)
def test_the_card_says_what_is_short(query: str, said: str, visitor: Any) -> None:
    assert said in card_of(visitor.get(f"/plan?{query}&lang=en").text)


def test_the_page_says_how_far_our_peaks_were_off(visitor: Any) -> None:
    """The figures of the README, which are those of one file that both are made from."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"the (\d+) of them that were predicted before they were measured, at most ([\d.]+) %", readme)
    assert found is not None
    assert f"at most {found[2]} % on the {found[1]} that were predicted" in visitor.get(f"/plan?{FITS}&lang=en").text


def test_where_no_pace_is_claimed_none_is_shown(visitor: Any) -> None:
    found = visitor.get("/plan?model=tiny_mamba&card=this&precision=fp32&effective-batch=8&lang=en").text
    assert "tokens per second –" in card_of(found)
    assert "No pace is claimed" in found
    assert not re.search(
        r"\d tokens per second|\d</strong> <span class=\"quiet\">tokens/s|seconds per step",
        found.partition('id="words"')[0],
    )


def test_every_way_that_is_shown_can_be_chosen(visitor: Any) -> None:
    """By a link alone; and what comes back is that way, with the same bytes."""
    ways = answer_to(read_address(parse_qsl(FITS)), advice=False).ways
    page = html.unescape(visitor.get(f"/plan?{FITS}&lang=en").text)
    links = re.findall(r'<a class="ask" href="/plan\?([^"]+)" aria-label="Choose this', page)
    assert len(links) == len(ways) - 1
    for way, link in zip(ways[1:], links, strict=True):
        found = answer_to(read_address(parse_qsl(link)), advice=False)
        assert found.ways[0].levers == way.levers
        assert found.ways[0].footprint == way.footprint
    page = html.unescape(visitor.get(f"/plan?{link}&lang=en").text)
    back = re.search(r'<a class="ask" href="/plan\?([^"]+)">Back to the best', page)
    assert back is not None
    assert answer_to(read_address(parse_qsl(back[1])), advice=False).plan.chosen == ways[0]


def test_two_ways_stand_side_by_side(visitor: Any) -> None:
    first, other = answer_to(read_address(parse_qsl(FITS)), advice=False).ways[:2]
    page = html.unescape(visitor.get(f"/plan?{FITS}&lang=en").text)
    link = re.search(r'<a class="compare" [^>]*href="/plan\?([^"#]+)#compare"', page)
    assert link is not None
    table = html.unescape(visitor.get(f"/plan?{link[1]}&lang=en").text).partition('<section id="compare"')[2]
    number = '<td class="number">([^<]+)</td>'
    rows = re.findall(rf'<th scope="row">([^<]+)</th>{number}{number}', table)
    totals = [row[1:] for row in rows if row[0] == "total"]
    gib = [f"{way.footprint.gpu.required_bytes / 2**30:.1f}" for way in (first, other)]
    assert list(totals[0]) == gib
    assert list(totals[2]) == [f"{way.pace.step_s:.2f}" for way in (first, other)]
    assert {"weights", "optimizer states", "arithmetic", "communication"} <= {row[0] for row in rows}
    assert '<section id="compare"' not in visitor.get(f"/plan?{FITS}&compare=nonsense").text


def test_a_link_means_the_same_on_another_machine(visitor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`this` and a measured machine are others' unknown: the link names cards, counts and RAM, and no token."""
    here = parse_hardware("2xRTX4090", "128GB")
    monkeypatch.setattr("tightfit.job.file.read_hardware", lambda *words, **sizes: here)
    query = "model=1b_mamba&card=this&seq=512"
    page = html.unescape(visitor.get(f"/plan?{query}&lang=zh").text)
    link = re.search(r'copy-link" href="/plan\?([^"]+)"', page)
    assert link is not None
    assert dict(parse_qsl(link[1])) == {
        "model": "1b_mamba", "gpus": "2", "card": "RTX4090", "host-ram": "128GB", "seq": "512"
    }  # fmt: skip


def test_every_card_has_a_word_that_others_understand() -> None:
    assert [card for card in CARDS if parse_hardware(card_word(card.gpu)).gpu != card.gpu] == []


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("query", [FITS, TIGHT])
def test_the_picture_stands_alone(query: str, language: str, visitor: Any) -> None:
    answer = visitor.get(f"/plan/picture.svg?{query}&lang={language}")
    assert answer.headers["content-type"] == "image/svg+xml"
    read = ElementTree.fromstring(answer.text)  # noqa: S314 (ours)
    words = [" ".join(each.itertext()) for each in read.iter("{http://www.w3.org/2000/svg}text")]
    assert "tightfit" in words
    assert any(word.startswith("1b_mamba (1.37B)") for word in words)
    fits = {"en": ("Does not fit", "Fits"), "zh": ("放不下", "放得下")}[language][query == FITS]
    assert any(fits in word for word in words)
    assert "href" not in answer.text
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", answer.text)


def test_ways_that_are_equally_fast_are_marked_and_the_choice_is_explained(visitor: Any) -> None:
    query = f"{FITS}&lang=en"
    report = visitor.get(f"/plan/answer.json?{query}").json()
    equal = [way["strategy"] for way in report["alternatives"] if way["as_fast_as_chosen"]]
    assert equal
    page = html.unescape(visitor.get(f"/plan/answer?{query}").text)
    assert report["chosen_for"] in page
    chosen, *rivals = page.split('<li class="way')[1:]
    assert "≈" not in chosen
    marked = [rival for rival in rivals if "≈ equally fast" in rival]
    assert marked
    assert all(any(f">{name}<" in "".join(each.split("\n")) for name in equal) for each in marked)


def test_what_would_make_it_fit_comes_when_it_is_asked_for(visitor: Any) -> None:
    query = f"{TIGHT}&seq=1536&lang=en"
    first = visitor.get(f"/plan/answer?{query}").text
    assert 'data-advised="0"' in first
    assert "Looking for what would make it fit" in first
    then = visitor.get(f"/plan/answer?{query}&advice=1").text
    assert 'data-advised="1"' in then
    assert 'data-allow="' in then


def test_what_would_make_it_fit_comes_before_the_bars_and_more_gpus_are_a_link(visitor: Any) -> None:
    page = html.unescape(visitor.get(f"/plan?{TIGHT}&lang=en").text)
    assert page.index("What would make it fit") < page.index('<ol class="ways">')
    few = "model=1b_mamba&gpus=1&card=16GB&host-ram=8GB&engine=zero3&offload-optimizer=none&lang=en"
    page = html.unescape(visitor.get(f"/plan?{few}").text)
    needed = re.search(r"Without a change, (\d+) of these GPUs would do", page)
    link = re.search(r'<a class="ask" href="/plan\?([^"]+)">Plan for', page)
    assert needed is not None
    assert link is not None
    found = answer_to(read_address(parse_qsl(link[1])), advice=False).plan
    assert (found.hardware.world, found.fits) == (int(needed[1]), True)


def test_a_first_word_comes_from_the_last_answer(visitor: Any) -> None:
    last = re.search(r'data-address="([^"]+)"', visitor.get(f"/plan/answer?{FITS}&lang=en").text)
    assert last is not None
    like = last[1].replace("&amp;", "&")
    longer = FITS.replace("seq=1024", "seq=1536")
    guess = visitor.get("/plan/guess", params={**dict(parse_qsl(longer)), "like": like, "lang": "en"}).text
    shown = visitor.get(f"/plan/answer?{FITS}&lang=en").text.count('<li class="way')
    assert shown - 1 <= guess.count("<li ") <= shown  # one may not be worth showing for the new question
    assert guess.count("data-guess") == 1
    assert "Pricing every way" in guess
    same = visitor.get("/plan/guess", params={**dict(parse_qsl(FITS)), "like": like, "lang": "en"}).text
    size = re.compile(r"[\d.]+ / 24\.0 GiB")
    chosen = size.search(visitor.get(f"/plan/answer?{FITS}").text)
    guessed = size.search(same)
    assert chosen is not None
    assert guessed is not None
    assert chosen[0] == guessed[0]
    for wrong in (
        {"like": ""},
        {"like": "model=unknown"},
        {"like": like, "seq": "x"},
        {"like": like, "engine": "zero9"},
    ):
        assert visitor.get("/plan/guess", params={**dict(parse_qsl(FITS)), **wrong}).text == ""


def test_the_files_are_those_that_the_command_writes(visitor: Any, tmp_path: Path) -> None:
    command = shlex.split(read_address(parse_qsl(FITS)).command("plan", "--write", str(tmp_path / "plan")))
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = visitor.get(f"/plan/files.zip?{FITS}")
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as packed:
        found = {name.removeprefix("tightfit-plan/"): packed.read(name).decode() for name in packed.namelist()}
    assert found == {path.name: path.read_text() for path in (tmp_path / "plan").iterdir()}
    listed = visitor.get(f"/plan/files?{FITS}").text
    assert all(name in listed for name in found)
    assert visitor.get(f"/plan/files.zip?{TIGHT}").status_code == 404


@pytest.mark.thorough
def test_the_saved_page_stands_alone(visitor: Any) -> None:
    answer = visitor.get(f"/plan/saved?{FITS}&lang=en")
    assert 'filename="tightfit-plan.html"' in answer.headers["content-disposition"]
    read = Reader(answer.text)
    assert read.links == []
    assert read.scripts == 0
    assert "@import" not in answer.text
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", answer.text)
    assert "&#34;" not in answer.text.partition("</style>")[0]
    assert "worker.json" in answer.text
    assert '<table class="heat">' in answer.text


@pytest.mark.parametrize(
    ("query", "said", "field"),
    [
        ("seq=abc", "“Sequence length” takes a whole number", "seq"),
        ("seq=-5", "“Sequence length” must be a whole number of at least 1", "seq"),
        ("seq=999999999999", "“Sequence length” must be at most", "seq"),
        ("gpus=6&card=notacard", "We know no card", "card"),
        ("gpus=99999&card=24GB", "1 to 1024 GPUs", "gpus"),
        ("gpus=many&card=24GB", "“GPUs per node” takes a whole number", "gpus"),
        ("effective-batch=7&gpus=6&card=24GB", "use 6 or 12", "effective-batch"),
        ("margin=4", "“GPU memory kept free” is a share", "margin"),
        ("host-ram=lots&gpus=1&card=24GB", "lots", "host-ram"),
        ("allow=everything&model=1b_mamba", "everything", "allow"),
        ("model=no/such-model", "no preset", "model"),
        ("config=not json", "not JSON", "config"),
        ("method=lora&lora-rank=0", "“LoRA rank” must be a whole number of at least 1", "lora-rank"),
        ("engine=zero0&offload-optimizer=cpu", "“Optimizer offload” cpu needs", ""),
    ],
)
def test_what_makes_no_sense_is_said_in_its_place(
    query: str, said: str, field: str, visitor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the form, and at the field that is wrong."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = visitor.get(f"/plan?{query}&lang=en", headers=HTML)
    assert page.status_code == 400
    assert said in page.text
    assert f'data-field="{field}"' in page.text
    assert '<form id="plan"' in page.text, "the form stays, to be put right"
    fragment = visitor.get(f"/plan/answer?{query}")
    assert fragment.status_code == 200, "a script shows it; the console has nothing to complain of"
    assert "data-problem" in fragment.text
    assert "Traceback" not in fragment.text
    assert visitor.get(f"/plan/answer.json?{query}").status_code == 400


def test_what_is_typed_is_text_alone(visitor: Any) -> None:
    hostile = "<script>alert(1)</script>"
    for name in ("model", "card", "gpus", "seq", "host-ram", "config", "allow"):
        for place in ("/plan", "/plan/answer"):
            text = visitor.get(place, params={name: hostile, "lang": "en"}).text
            assert hostile not in text
            Reader(text)


def test_a_config_that_is_pasted_becomes_short(visitor: Any) -> None:
    long = json.dumps({**json.loads(CONFIG), "filler": ["x"] * 50_000})
    answer = visitor.post("/plan/config", content=long).json()
    assert len(answer["config"]) < 1000
    assert json.loads(answer["config"]).keys() <= json.loads(CONFIG).keys()
    assert "not JSON" in visitor.post("/plan/config", content="{").json()["problem"]["text"]
    assert "not JSON" in visitor.post("/plan/config", content=b"\xff\xfe\x00").json()["problem"]["text"]
    assert visitor.post("/plan/config", content=b"x" * (2**20 + 1)).status_code == 413


def test_nothing_is_written(visitor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visitor.get(f"/plan?{FITS}")
    visitor.get(f"/plan/files.zip?{FITS}")
    visitor.get(f"/plan?{FITS}&write=plan&force=1")
    assert list(tmp_path.iterdir()) == []


def test_every_word_that_the_script_names_is_there() -> None:
    script = (STATIC / "plan.js").read_text(encoding="utf-8")
    for name in re.findall(r"\bwords\.([a-z_]+)", script):
        assert name in words("en")["plan"]


def test_a_slider_is_answered_at_once() -> None:
    """The processor's time of the server: what the machine does beside it does not count."""
    last = answer_to(read_address(parse_qsl(FITS)), advice=False)
    times = []
    for length in (256, 512, 768, 1536, 2048):
        asked = read_address(parse_qsl(FITS.replace("seq=1024", f"seq={length}")))
        began = time.process_time()
        draw(guessed(asked, last), words("en"), advice=False)
        times.append(time.process_time() - began)
    assert sorted(times)[2] < 0.1


# --- who will train it --------------------------------------------------------------------------

LLAMAFACTORY = "for=llamafactory&model=qwen2.5-7b&method=lora&gpus=1&card=RTX4090"


def test_the_first_question_is_who_will_train_it(visitor: Any) -> None:
    page = visitor.get(f"/plan?{LLAMAFACTORY}&lang=en").text
    form = page[page.index("<form") : page.index("</form>")]
    assert re.findall(r'name="([\w-]+)"', form)[0] == "for"
    assert re.search(r'<option value="llamafactory" selected>LLaMA-Factory</option>', form)
    assert "bash plan/launch.sh" in page
    assert "tightfit train --plan" not in page
    assert "用什么训练？" in visitor.get(f"/plan?{LLAMAFACTORY}&lang=zh").text


def test_the_files_are_for_the_trainer_that_was_named(visitor: Any) -> None:
    names = re.findall(r"<summary><code>([\w.]+)</code>", visitor.get(f"/plan/files?{LLAMAFACTORY}").text)
    assert "llamafactory.yaml" in names
    assert "worker.json" not in names
    found = visitor.get(f"/plan/answer.json?{LLAMAFACTORY}").json()
    assert found["trainer"] == "llamafactory"
    assert found["chosen"]["levers"]["checkpointing"] in ("full", "none", "full+offload")


def test_a_preset_would_start_with_drawn_weights_and_random_tokens_which_is_said(visitor: Any) -> None:
    page = visitor.get(f"/plan?{FITS}&lang=en").text
    assert "is a shape without weights, so they are drawn from the seed" in page
    assert "the samples are random tokens" in page
    assert "没有权重" in visitor.get(f"/plan?{FITS}&lang=zh").text
    real = visitor.get("/plan?model=Qwen/Qwen2.5-7B&gpus=8&card=80GB&lang=en").text
    assert "is a shape without weights" not in real
