"""Secrets in log lines: what is shown as evidence must be safe to paste into an issue."""

from __future__ import annotations

import re

_MASK = "***"
_WHOLE = re.compile(
    r"""
      \b(?:hf|api_org)_[A-Za-z0-9]{16,}
    | \b(?:sk|pk|rk)-(?:proj-|ant-|or-)?[A-Za-z0-9_-]{16,}
    | \b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} | \bglpat-[A-Za-z0-9_-]{16,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[A-Za-z0-9_-]{30,}
    | \bxox[abprs]-[A-Za-z0-9-]{10,}
    | \beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*
    | \bms-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}
    | \b(?:local-)?[0-9a-f]{40}\b
    """,
    re.VERBOSE,
)
"""Forms that name themselves: Hugging Face, OpenAI and its kin, GitHub, GitLab, AWS, Google, Slack, JWT, ModelScope,
Weights & Biases."""
_NAMED = re.compile(
    r"""(?ix)
    ( \b[\w.-]*(?: api[_-]?key | apikey | access[_-]?key | secret | passwd | password | pwd | auth[_-]?token
                 | access[_-]?token | (?<![a-z])token | credential )s?[\w-]* ["']? \s*
      (?: [=:] \s* | \s(?=["'\w]*\d) ) )
    ( ["']? ) ( (?:bearer\s+|basic\s+)? [^\s"',;&)}\]]{6,} )
    """
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@:]*(?::[^\s/@]*)?@")
_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:token|key|sig|signature|secret|password|auth|credential)[\w-]*)=)[^&\s\"']+")
_HARMLESS = re.compile(
    r"(?i)^(?:none|null|true|false|\d{1,8}(?:\.\d+)?|<[^>]*>|\[?\d[\d, .]*\]?|\*+|tensor\(.*|\(.*|\{.*|\[.*)$"
)
_NO_SECRETS = re.compile(
    r"tokens?_(?:id|ids|type|per|count|seen|length)|tokens$|tokenizer|"
    r"(?:bos|eos|pad|unk|sep|cls|mask|special|stop|image|video|audio)_?token$"
)


def masked(text: str) -> str:
    text = _URL.sub(rf"\1{_MASK}@", text)
    text = _QUERY.sub(rf"\1{_MASK}", text)
    text = _BEARER.sub(rf"\1 {_MASK}", text)
    text = _NAMED.sub(_mask_value, text)
    return _WHOLE.sub(_MASK, text)


def _mask_value(found: re.Match[str]) -> str:
    """`pad_token_id: 151643` and `token_type_ids` are no secrets."""
    name, quote, value = found.groups()
    word = re.split(r"[\s\"'=:]", name.strip())[0].lower()
    is_kept = _HARMLESS.match(value) or _NO_SECRETS.search(word)
    return found[0] if is_kept else f"{name}{quote}{_MASK}"
