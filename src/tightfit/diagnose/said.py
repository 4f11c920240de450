"""Is a line an error message, or does it merely speak of one?

Logs quote their data, print advice and name their options: "if you see CUDA out of memory, lower the batch size",
"sample 3: RuntimeError: …", "nan_policy=skip". A phrase counts when the message begins with it, or when what stands
before it on the line announces a failure.
"""

from __future__ import annotations

import re

from tightfit.diagnose.lines import LogMessage

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
_DATA = re.compile(
    r"""(?ix)
      ["'](?:text|content|prompt|instruction|input|output|response|question|answer|query|label|messages?|conversation|
           title|body|document|completion|chosen|rejected|value|from)["']\s*:
    | ^\W*(?:sample|example|user|human|assistant|prompt|instruction|question|answer|query|response|input|output|
           text|label|labels|generated|prediction|reference|document|row|record|line)s?\b[^:|]{0,20}[:=|]
    | <\|?\w+\|?> | \[/?INST\] | \#\#\# | input_ids | ^\s*(?:[-*•]\s|\d+[.)]\s|//|\#)
    """
)
_PROGRAM = re.compile(
    r"^[\w./~-]+\.(?:py|sh|cpp|cc|cu|h|c)(?::\d+)*$|^\S*\b(?:torchrun|deepspeed|accelerate|python[\d.]*)$"
)
_MOST_LEAD = 160
_RAISED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt)(?:\(|:|$)|^(?:[a-z_]\w*\.)+[A-Z]\w+: "
)
"""A line that begins with the name of an exception is the last one of a traceback."""


_HARMLESS = re.compile(
    r"\baccepting this combination\b|^\s*(?:warnings?\.)?warn\(|"
    r"\b(?:will|can) be (?:safely )?ignored\b|\b(?:safely|simply) ignore\b|\bproceed(?:ing)? (?:anyway|without)\b|"
    r"\bcontinu(?:e|ing) (?:anyway|without)\b"
)


def is_raised(message: LogMessage) -> bool:
    """Whether a line begins with the name of an exception."""
    return _RAISED.match(message.text) is not None


def is_harmless(text: str) -> bool:
    """Whether a line says of itself that the program goes on."""
    return _HARMLESS.search(text) is not None


def is_quoted(lead: str) -> bool:
    """Whether what stands before a phrase shows it to be somebody's data."""
    return _DATA.search(lead) is not None


def is_said(message: LogMessage, lead: str, *, anywhere: bool) -> bool:
    """Whether a phrase with this before it on its line is what the message says; `anywhere`: also unannounced."""
    lead = lead.strip()
    if is_raised(message):
        return True
    if is_quoted(lead):
        return False
    lead = _TYPE.sub("", lead).strip(" :>|-=*\t")
    if not lead or _PROGRAM.match(lead):
        return True
    if _TALK.search(lead) or (not anywhere and (len(lead) > _MOST_LEAD or lead.count('"') % 2 or lead.count("`") % 2)):
        return False
    return anywhere or message.level == "error" or _ALARM.search(lead) is not None
