"""One line of a log: what launchers and loggers put before the message read and taken off.

    [rank3]: …   [default3]: …   3: … (srun --label)   [1,3]<stderr>: … (mpirun)   node-2: … (pdsh)
    (Worker pid=41, ip=10.0.0.7) …   trainer-0  | …   2026-11-05T12:00:01Z stderr F … (Kubernetes)
    Nov 05 12:00:01 node-2 python[41]: … (journald)
    [2026-11-05 12:00:01,123] [ERROR] [a.py:3:f] …   [ERROR|trainer.py:812] 2026-11-05 12:00:01,123 >> …
    ERROR:root:…   E1105 12:00:01.123456 41 a.cc:7] …   2026-11-05 12:00:01 | ERROR    | mod:f:7 - …

The rank tells whose line it is. The rest only stands in the way of knowing whether a line *is* an error message or
merely has one in it. Indentation after the launcher's prefix is kept: it is what makes a traceback one.

For logs quote their data, print advice and name their options: "if you see CUDA out of memory, lower the batch size",
"sample 3: RuntimeError: …", "nan_policy=skip". A phrase counts when the message begins with it, or when what stands
before it on the line announces a failure.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import lru_cache
from typing import Literal, NamedTuple

from tightfit.diagnose.gate import Expression

Level = Literal["debug", "info", "warning", "error"]
MOST_LETTERS = 4000  # of a line that are looked at

_STRANGE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_LAUNCHERS = re.compile(
    r"""
      \[(?:rank|default|RANK|Rank|GPU)\ ?:?\ ?(?P<a>\d{1,5})\]:?\ ?
    | (?:rank|RANK|Rank)[ _-]?(?P<b>\d{1,5})\ ?(?::|\|)\ ?
    | \[\d+,(?:mpirank:)?(?P<c>\d{1,5})(?:,[\w.-]+)?\](?:<std(?:out|err)>)?:\ ?
    | (?P<d>\d{1,4}):(?:\ |(?=\[|Traceback))
    | (?P<nccl>[\w.-]+:\d+:\d+)\ \[\d+\]\ (?:[\w/.]+\.(?:cc|h|cpp|cu):\d+\ )?
    | \((?:[\w.:-]+,?\ )*(?:rank=(?P<e>\d+)\ )?(?P<pid>pid=\d+)(?:,\ ip=[\w.:]+)?(?:,\ rank=(?P<f>\d+))?\)\ ?
    | (?P<host>(?:\d{1,3}\.){3}\d{1,3}|(?=[\w.-]*\d)[a-z][\w.-]{0,63}(?<!rror)(?<!ption)):\ (?=\S|\ \ )
    | (?P<pod>[a-z][\w.-]*\d[\w.-]*)\s+\|\ ?
    | \[(?P<worker>[a-z][\w-]*-\d+(?:-\d+)*)\]:?\ ?
    | (?:stderr|stdout|err|out):\ ? | (?:stderr|stdout)\ [FP](?:\ |$)
    """,
    re.VERBOSE,
)
_STAMPS = re.compile(
    r"""
      \[?\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:\ ?Z|\ UTC|\ ?[+-]\d\d:?\d\d)?\]?
      (?:\ *(?:-|\||:|>>)(?=\ ))?\ ?(?:[\w.-]+\ [\w.@/-]+\[\d+\]:\ ?)?
    | \[?\d\d/\d\d/\d{2,4}\ \d\d:\d\d:\d\d(?:[.,]\d+)?(?:\ [AP]M)?\]?(?:\ *(?:-|\|)(?=\ ))?\ ?
    | (?P<letter>[IWEFC])\d{4}\ \d\d:\d\d:\d\d(?:\.\d+)?\ +(?:\d+\ )?[\w./<>+-]+:\d+\]\ ?
    | (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\ +\d{1,2}\ \d\d:\d\d:\d\d
      (?:(?:\ [\w.-]+)?\ [\w.@/-]+\[\d+\]:\ ?|(?:\ [\w.-]+)?\ (?=\S))
    | \[\ *\d{1,8}\.\d{3,9}\]\ ?
    | \[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\ \w{3}\ +\d{1,2}\ \d\d:\d\d:\d\d\ \d{4}\]\ ?
    | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?(?:\ *(?:-|\|)(?=\ ))?\ ?(?=\S)
    """,
    re.VERBOSE,
)
_LOGGERS = re.compile(
    r"""
      \[?(?P<level>DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|SEVERE|Error|Warning)(?:\|[^\]|]*(?:\|[^\]]*)?)?\]
      \ ?(?:-\ |:\ )?
    | (?P<level2>DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|SEVERE)(?:\s*[|>-]\s*|\s*:\s*(?:[\w.]+:(?=\S))?)
    | (?P<level3>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\s+(?=[\[\w])
    | \[[\w./-]+\.(?:py|cc|cpp|cu|h)(?::\d+)?(?::[\w<>.]+)?(?:\(\))?\]:?\ ?
    | \[(?:PG[^\]]*?|[Rr]ank[ :]*|RANK[ :]*)(?P<rank>\d{1,5})\]:?\ ? | \[PID:\d+\]\ ? | \[[\w.]+(?:\.\w+)+:\d+\]\ ?
    | \[(?P<letter>[EWIFC])\d*[^\]]*?\.(?:cpp|cc|h|hpp):\d+\]\ ?
    | \[\d{1,7}\](?:\ |(?=\[))
    | [\w./<>-]+:[\w<>]+:\d+\ -\ | [\w.]+\ -\ (?=\S) | [\w./-]+\.py:\d+(?:\]|:)?\ (?:>>\ )?
    | [\w.]*(?:\.\w+)+:\d+\ >>\ | >>\ | (?:torch|accelerate|transformers|deepspeed)(?:\.[a-z_]+)+:\ (?=\S)
    | (?:kernel|slurmstepd|srun):\ (?:\[\ *\d+\.\d+\]\ ?)? | (?:NCCL|RCCL)\ (?:INFO|WARN)\ +
    | ErrorMessage\ "
    """,
    re.VERBOSE,
)
_BAR = re.compile(r"^(?:[^|\n]{0,80}?\d{1,3}%\|[^|]*\|\s*[\d.]+\w?/[\d.?]+\w?\s*\[[^\]]*\]:?\s*)+(?=\S)")
"""A progress bar has no line end of its own: what another process prints next stands on its line."""
_LEVELS: dict[str, Level] = {
    "DEBUG": "debug", "INFO": "info", "NOTICE": "info", "WARNING": "warning", "WARN": "warning", "I": "info",
    "W": "warning",
}  # fmt: skip


class LogMessage(NamedTuple):
    """A line without its prefixes."""

    number: int
    text: str  # the message, indentation included
    whole: str  # the line as it stands, without colours
    rank: int | None
    stream: str  # lines with the same mark come from one process, where marks tell processes apart
    level: Level | None

    @property
    def head(self) -> str:
        return self.text.lstrip()


def plain(data: bytes) -> str:
    """A line's bytes as text, without what would steer a terminal."""
    if len(data) > 4 * MOST_LETTERS and b"%|" in data:
        data = data[max(0, data.rindex(b"%|") - 8) :]  # bars whose `\\r` got lost: what counts comes after the last
    text = data[: 4 * MOST_LETTERS].decode("utf-8", errors="replace")[:MOST_LETTERS]
    return (text if text.isprintable() else _STRANGE.sub(" ", text)).rstrip()


def message_of(line: str, number: int, rank: int | None = None, learnt: re.Pattern[str] | None = None) -> LogMessage:
    """Read and take off what stands before the message. `learnt`: a prefix that this log was seen to have."""
    text, rank, stream, level = _read_prefixes(line, rank, learnt)
    return LogMessage(number, text, line, rank, stream, level)


@lru_cache(2048)  # ranks fall in the same lines, and again after each start
def _read_prefixes(
    line: str, rank: int | None, learnt: re.Pattern[str] | None
) -> tuple[str, int | None, str, Level | None]:
    rest, streams, level = line, "", None
    if "%|" in rest:
        bar = _BAR.match(rest)
        rest = rest[bar.end() :] if bar else rest
    if learnt is not None and (strange := learnt.match(rest)):
        rest = rest[strange.end() :]
    for _ in range(4):
        found = None if rest[:1].isspace() else _LAUNCHERS.match(rest)
        stamp = None if found else _STAMPS.match(rest)
        if found:
            groups = found.groupdict()
            given = next((groups[name] for name in "abcdef" if groups[name]), None)
            rank = rank if given is None else int(given)
            marks = (given, *(groups[name] for name in ("pid", "nccl", "host", "pod", "worker")))
            streams += f"/{next((mark for mark in marks if mark), '')}"
            rest = rest[found.end() :]
        elif stamp:
            level = _level(stamp["letter"]) or level
            rest = rest[stamp.end() :]
        else:
            break
    for _ in range(5):
        found = _LOGGERS.match(rest)
        stamp = None if found else _STAMPS.match(rest)
        if found:
            level = _level(found["level"] or found["level2"] or found["level3"] or found["letter"]) or level
            rank = int(found["rank"]) if found["rank"] else rank
            rest = rest[found.end() :]
        elif stamp:
            rest = rest[stamp.end() :]
        else:
            break
    return rest, rank, streams, level


_NO_PREFIX = re.compile(r"(?i)error|exception|fail|original|traceback|:\s+$")
_LONGEST_PREFIX = 120


def prefix_of(message: LogMessage, start: int) -> re.Pattern[str] | None:
    """What stands before every line, to judge by what stands before one that is known to begin at `start` of its
    message: somebody's collector puts there what no list of ours has. Its numbers may change from line to line."""
    lead = message.text[:start]
    before = message.whole[: message.whole.rfind(message.text) + start]
    if not re.search(r"\w", lead) or _NO_PREFIX.search(lead) or len(before) > _LONGEST_PREFIX:
        return None
    return re.compile(re.sub(r"\d+", r"\\d+", re.escape(before)))


def _level(word: str | None) -> Level | None:
    return _LEVELS.get(word.upper(), "error") if word else None


_NEAR = 1024
_TIME = re.compile(r":\d\d:\d\d")
_DATED = re.compile(
    r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T_ ](?P<t>\d\d:\d\d:\d\d)(?P<f>[.,]\d{1,6})?"
    r"|\b[IWEFC](?P<mo3>\d\d)(?P<d3>\d\d) (?P<t3>\d\d:\d\d:\d\d)(?P<f3>\.\d{1,6})?"
)


def moment_of(text: str) -> float | None:
    """The last date with a time in a text, as seconds. Zones are left alone: one run's logs share theirs."""
    if not _TIME.search(text):
        return None
    near = text[text.rfind("\n", 0, max(0, len(text) - _NEAR)) + 1 :]  # where it mostly is
    found = list(_DATED.finditer(near)) or list(_DATED.finditer(text))
    if not found:
        return None
    last = found[-1]
    year = int(last["y"] or datetime.now(timezone.utc).year)
    clock = (last["t"] or last["t3"]).split(":")
    part = float((last["f"] or last["f3"] or "0").replace(",", "."))
    try:
        day = datetime(year, int(last["mo"] or last["mo3"]), int(last["d"] or last["d3"]), tzinfo=timezone.utc)
    except ValueError:
        return None
    return day.timestamp() + int(clock[0]) * 3600 + int(clock[1]) * 60 + int(clock[2]) + part


# --- is a line an error message, or does it merely speak of one? ---------------------------------

_TYPE = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Failure)\b:?\s*(?:\[[^\]]*\]\s*)?)+$"
)
_ALARM = re.compile(
    r"\b(?:error|errors|exception|fail(?:ed|ure|s)?|fatal|critical|abort(?:ed|ing)?|crash(?:ed)?|caught|rais(?:ed|ing)|"
    r"panic|cannot|could not|unable|terminat\w+|what\(\)|reason|cause|stopp(?:ed|ing)|because|due to|died|dead)\b|"
    r"错误|失败|异常|报错",
    re.IGNORECASE,
)
_TALK = re.compile(
    r"\b(?:if|avoid|avoids|prevent|prevents|may|might|could (?:lead|cause|result)|can (?:lead|cause|result)|in case|"
    r"unless|helps?|tips?|hint|note that|faq|how (?:to|do|can)|troubleshoot\w*|example|e\.g|fix(?:es|ed)? for|"
    r"in order to|to reduce|risk|likely|potential(?:ly)?|recover(?:ed|ing|y)|retry(?:ing)?|fall(?:ing)? back|"
    r"handled|previous(?:ly)?|last (?:run|time|attempt)|earlier)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(
    r"""(?ix)
      ["'](?:text|content|prompt|instruction|input|output|response|question|answer|query|label|messages?|conversation|
           title|body|document|completion|chosen|rejected|value|from)["']\s*:
    | ^\W*(?:sample|example|user|human|assistant|prompt|instruction|question|answer|query|response|input|output|
           text|label|labels|generated|prediction|reference|document|row|record|line)s?\b[^:|]{0,20}[:=|]
    | <\|?\w+\|?> | \[/?INST\] | \#\#\# | input_ids | ^\s*(?:[-*•]\s|\d+[.)]\s|//|\#)
    """
)
"""In what stands before a phrase: it is somebody's data."""
_PROGRAM = re.compile(
    r"^[\w./~-]+\.(?:py|sh|cpp|cc|cu|h|c)(?::\d+)*$|^\S*\b(?:torchrun|deepspeed|accelerate|python[\d.]*)$"
)
_MOST_LEAD = 160
_RAISED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt)(?:\(|:|$)|^(?:[a-z_]\w*\.)+[A-Z]\w+: "
)
"""A line that begins with the name of an exception is the last one of a traceback."""
HARMLESS = Expression(
    r"\baccepting this combination\b|^\s*(?:warnings?\.)?warn\(|"
    r"\b(?:will|can) be (?:safely )?ignored\b|\b(?:safely|simply) ignore\b|\bproceed(?:ing)? (?:anyway|without)\b|"
    r"\bcontinu(?:e|ing) (?:anyway|without)\b",
    re.RegexFlag(0),
)
"""A line that says of itself that the program goes on."""


def is_raised(message: LogMessage) -> bool:
    return _RAISED.match(message.text) is not None


def is_said(message: LogMessage, lead: str, *, anywhere: bool) -> bool:
    """Whether a phrase with this before it on its line is what the message says; `anywhere`: also unannounced."""
    lead = lead.strip()
    if is_raised(message):
        return True
    if QUOTED.search(lead):
        return False
    lead = _TYPE.sub("", lead).strip(" :>|-=*\t")
    if not lead or _PROGRAM.match(lead):
        return True
    if _TALK.search(lead) or (not anywhere and (len(lead) > _MOST_LEAD or lead.count('"') % 2 or lead.count("`") % 2)):
        return False
    return anywhere or message.level == "error" or _ALARM.search(lead) is not None
