"""Chat templates by name, for tokenizers that have none and for users who want another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tightfit.inputs.spelling import nearest, read_text
from tightfit.messages import Message, Said, text
from tightfit.types import ConfigError

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'assistant' %}
{{- '<start_of_turn>model\\n' }}
{%- generation %}{{- message['content'] | trim + '<end_of_turn>' }}{%- endgeneration %}
{%- else %}
{{- '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

ALPACA = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '### Response:\\n' }}
{%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
{{- '\\n\\n' }}
{%- elif message['role'] == 'system' %}
{{- message['content'] + '\\n\\n' }}
{%- else %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}
"""

PLAIN = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- 'Assistant: ' }}
{%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
{{- '\\n' }}
{%- elif message['role'] == 'system' %}
{{- message['content'] + '\\n' }}
{%- else %}
{{- 'User: ' + message['content'] + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "alpaca": ALPACA, "plain": PLAIN}

OTHER_NAMES = {"qwen": "chatml", "gemma2": "gemma", "gemma3": "gemma", "llama-3": "llama3", "default": "plain"}
"""What LLaMA-Factory calls the same turns."""

FALLBACK = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A template, and why it is this one."""

    name: Said
    source: str
    said: tuple[Message, ...] = ()


def choose_template(asked: str | None, own: str | None) -> Chosen:
    """The template that was asked for, else the tokenizer's own, else a simple one."""
    if asked is None:
        if own:
            return Chosen(name=Message("data.own-template"), source=own)
        said = Message("data.fallback-template", fallback=FALLBACK)
        return Chosen(name=FALLBACK, source=TEMPLATES[FALLBACK], said=(said,))
    name = OTHER_NAMES.get(asked.lower(), asked.lower())
    if name in TEMPLATES:
        return Chosen(name=name, source=TEMPLATES[name])
    path = Path(asked).expanduser()
    if path.is_file():
        return Chosen(name=path.name, source=read_text(path, text("data.jinja-template")))
    if path.suffix in (".jinja", ".j2") or "/" in asked:
        raise ConfigError(Message("data.no-template-file", asked=asked, known=", ".join(TEMPLATES)))
    close = nearest(asked, TEMPLATES)
    hint = (
        Message("data.did-you-mean", close=close)
        if close
        else Message("data.known-templates", known=", ".join(TEMPLATES))
    )
    raise ConfigError(Message("data.no-template", asked=asked, hint=hint))
