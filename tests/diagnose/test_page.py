"""The pages say what the catalogue and the program say. After a change of either,

    python tests/diagnose/test_page.py

writes docs/symptoms.md, its Chinese twin in docs/zh, and the printed parts of docs/diagnose.md, anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from tightfit.cli import main
from tightfit.diagnose.catalogue import catalogue
from tightfit.diagnose.judge import fixes_of
from tightfit.diagnose.verdict import RETRYABLE
from tightfit.job.known import KnownConfig
from tightfit.messages import LANGUAGES, Language, Said, say

DOCS = Path(__file__).parents[2] / "docs"
SYMPTOMS: dict[Language, Path] = {"en": DOCS / "symptoms.md", "zh": DOCS / "zh" / "symptoms.md"}
DIAGNOSE = DOCS / "diagnose.md"
FILE = re.compile(r"^`([\w.-]+)`:\n+```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADS: dict[Language, str] = {
    "en": """# Symptoms

[中文](zh/symptoms.md)

What [`tightfit diagnose`](diagnose.md) knows: {count} symptoms, by the kind of their cause. The supervisor of \
`tightfit train` judges by the same catalogue. This page is made from it (`python tests/diagnose/test_page.py`).

- *certain*, *likely*, *possible*: how sure a verdict of this name is.
- *special case of*: it is looked for where the other was found, and says more.
- *echo*, *trailing*: it follows from a failure elsewhere, and is the verdict only where nothing else is known.
- *ending*: how a process ended; what it said before counts first.
- *note*: worth knowing, and never the verdict.
- A fix marked *changes the training* changes what is trained, and not only how.
""",
    "zh": """# 症状目录

[English](../symptoms.md)

[`tightfit diagnose`](diagnose.md) 认识的 {count} 种症状，按原因分类。\
`tightfit train` 的监督进程也按这份目录判断。本页由目录生成（`python tests/diagnose/test_page.py`）。

- *确定*、*很可能*、*可能*：这一判断的把握。
- *特例*：找到那个症状之后才会检查，给出更多信息。
- *连带*、*善后*：由别处的故障引起，只有在没有其他线索时才作为结论。
- *结束方式*：进程怎样结束；它之前输出的内容优先。
- *提示*：值得注意，但不会作为结论。
- 标有*会改变训练*的办法会改变训练的内容，而不只是训练的方式。
""",
}
TITLES = {
    "device-oom": ("The GPU's memory", "显存"),
    "fragmentation": ("Memory in pieces", "显存碎片"),
    "other-process": ("Somebody else on the GPU", "GPU 上有其他进程"),
    "host-oom": ("The host's memory", "主机内存"),
    "pinned-memory": ("Pinned memory", "锁页内存"),
    "shared-memory": ("Shared memory", "共享内存"),
    "communication": ("Communication between ranks", "rank 之间的通信"),
    "hang": ("Ranks that hang", "卡住的 rank"),
    "not-finite": ("Loss or gradients that are NaN or infinite", "损失或梯度为 NaN 或无穷"),
    "loss-scale": ("The loss scale", "loss scale（损失缩放）"),
    "disk-full": ("The disk", "磁盘"),
    "data": ("The data", "数据"),
    "code": ("The program", "程序"),
    "config": ("Settings", "设置"),
    "environment": ("The environment", "环境"),
    "preempted": ("Asked to leave", "被要求退出"),
    "hardware": ("Hardware", "硬件"),
    "unknown": ("Unknown", "未知"),
}
"""Of each kind of cause, in each of LANGUAGES."""
FACTS = {
    "certain": ("certain", "确定"),
    "likely": ("likely", "很可能"),
    "possible": ("possible", "可能"),
    "ending": ("ending", "结束方式"),
    "echo": ("echo", "连带"),
    "trailing": ("trailing", "善后"),
    "note": ("note", "提示"),
}
"""How sure it is, and those roles of which the page says something."""
SESSION = re.compile(r"^```text\n\$ (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(shlex.split(command)[1:])
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def refreshed(text: str) -> str:
    """The page with what its commands print, in a folder with the files that it shows."""
    here = Path.cwd()
    before = dict(os.environ)
    os.environ |= {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, body in FILE.findall(text):
                Path(folder, name).write_text(body, encoding="utf-8")
            os.chdir(folder)
            return SESSION.sub(lambda found: f"```text\n$ {found[1]}\n{shown(found[1])}```", text)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def symptom_page(language: Language) -> str:
    """The text of the page in a language."""
    known, place, is_english = catalogue(), LANGUAGES.index(language), language == "en"

    def escaped(said: Said) -> str:
        """Underscores are no emphasis."""
        return say(said, language).replace("_", "\\_")

    blocks = [HEADS[language].format(count=len(known.symptoms))]
    for kind, titles in TITLES.items():
        ours = sorted((symptom for symptom in known.symptoms if symptom.kind == kind), key=lambda each: each.id)
        if ours:
            blocks.append(f"## {titles[place]}\n")
        for symptom in ours:
            facts = [FACTS[word][place] for word in (symptom.confidence, symptom.role) if word in FACTS]
            if symptom.refines:
                bases = (", " if is_english else "，").join(f"[{base}](#{base})" for base in symptom.refines)
                facts.append(f"special case of {bases}" if is_english else f"{bases} 的特例")
            title, cause = symptom.title.text(language), escaped(symptom.cause.fill_any("*{}*"))
            said = f"**{title}.** {cause}. *({'; '.join(facts)})*"
            lines = [said if is_english else f"**{title}**。{cause}。*（{'；'.join(facts)}）*", ""]
            for fix in fixes_of(symptom, KnownConfig(), {}):
                command = f" `{fix.command}`" if fix.command is not None else ""
                costly = (" *(changes the training)*", " *（会改变训练）*")[place] if fix.is_costly else ""
                lines.append(f"- {escaped(fix.text)}{command}{costly}")
            if symptom.sources:
                sources = ", ".join(symptom.sources)
                lines += ["", f"From {sources}." if is_english else f"来源：{sources}。"]
            blocks.append("\n".join([f"### {symptom.id}\n", *lines, ""]).replace("。 ", "。"))
    return "\n".join(blocks)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_symptoms_is_the_catalogue(language: Language) -> None:
    page = symptom_page(language)
    assert SYMPTOMS[language].read_text(encoding="utf-8") == page, "stale: run this file"


def test_the_examples_are_what_is_printed() -> None:
    text = DIAGNOSE.read_text(encoding="utf-8")
    assert SESSION.search(text)
    assert text == refreshed(text), "stale: run this file"
    assert not any(printed.startswith("tightfit: ") for _, printed in SESSION.findall(text)), "an example fails"


def test_every_kind_has_a_title() -> None:
    assert {symptom.kind for symptom in catalogue().symptoms} <= set(TITLES)
    assert set(TITLES) >= RETRYABLE


if __name__ == "__main__":
    for language, page in SYMPTOMS.items():
        page.write_text(symptom_page(language), encoding="utf-8")
    DIAGNOSE.write_text(refreshed(DIAGNOSE.read_text(encoding="utf-8")), encoding="utf-8")
