"""Chats: what a template prints, and which of it is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightfit.messages import Message
from tightfit.train.data.chat import STAND_IN, TEMPLATES, ChatTemplate, Turn
from tightfit.train.data.tokens import Encoder, codec_of
from tightfit.types import ConfigError

CHAT = (
    Turn("system", "Be brief."),
    Turn("user", "What is two and two?"),
    Turn("assistant", "Four."),
    Turn("user", "And three?"),
    Turn("assistant", "Five, of course."),
)

CHATML, GEMMA = TEMPLATES["chatml"], TEMPLATES["gemma"]

BARE_CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- message.content.split('</think>')[-1].strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen3's: thoughts of earlier answers are dropped, the last answer gets an empty one."""

LLAMA2 = """\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source=source, name="test", special=tuple(special.items()))


def learned(source: str, turns: tuple[Turn, ...], **special: str) -> list[str]:
    made = template(source, bos_token="<s>", eos_token="</s>", **special).render_pieces(turns)
    return [made.text[first:last] for first, last in made.answers]


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (CHATML, ["Four.<|im_end|>", "Five, of course.<|im_end|>"]),
        (BARE_CHATML, ["Four.<|im_end|>", "Five, of course.<|im_end|>"]),
        (THINKING, ["Four.<|im_end|>", "<think>\n\n</think>\n\nFive, of course.<|im_end|>"]),
        (LLAMA2, [" Four. </s>", " Five, of course. </s>"]),
        (GEMMA, ["Four.<end_of_turn>", "Five, of course.<end_of_turn>"]),
        (TEMPLATES["alpaca"], ["Four.</s>", "Five, of course.</s>"]),
        (TEMPLATES["plain"], ["Four.</s>", "Five, of course.</s>"]),
        (TEMPLATES["llama3"], ["Four.<|eot_id|>", "Five, of course.<|eot_id|>"]),
    ],
)
def test_the_answers_and_their_ends_are_learned(source: str, answers: list[str]) -> None:
    assert learned(source, CHAT) == answers


def test_an_answer_that_repeats_the_question_is_found_where_it_stands() -> None:
    turns = (Turn("user", "Four."), Turn("assistant", "Four."), Turn("user", "Four."), Turn("assistant", "Four."))
    made = template(BARE_CHATML).render_pieces(turns)
    assert [made.text[a - 10 : a] for a, _ in made.answers] == ["assistant\n"] * 2
    assert [made.text[a:b] for a, b in made.answers] == ["Four.<|im_end|>"] * 2


@pytest.mark.thorough
def test_rendering_is_that_of_transformers(bytes_tokenizer: Any) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CHAT]
    for source in (CHATML, BARE_CHATML, THINKING, *TEMPLATES.values()):
        turns = template(source).arrange(CHAT)
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        theirs = bytes_tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
        ours = template(source, eos_token="<|end|>", bos_token="").render_pieces(CHAT).text
        assert ours == theirs


def test_the_mask_is_that_of_transformers_for_marked_templates(bytes_tokenizer: Any) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CHAT]
    theirs = bytes_tokenizer.apply_chat_template(
        messages, chat_template=CHATML, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    encoder = Encoder(codec_of(bytes_tokenizer, "chatml"), 512, "cut")
    ours = encoder.whole(encoder.template.render_pieces(CHAT))
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.learned.tolist() == theirs["assistant_masks"]


# --- templates that refuse ------------------------------------------------------------------------


def test_gemma_gets_the_system_turn_in_the_first_question() -> None:
    made = template(GEMMA, bos_token="<bos>").render_pieces(CHAT)
    first = made.text.split("<end_of_turn>")[0]
    assert first == "<bos><start_of_turn>user\nBe brief.\n\nWhat is two and two?"
    assert "system" not in made.text


def test_gemma_gets_a_user_before_an_answer_that_comes_first() -> None:
    turns = (Turn("assistant", "Hello!"), Turn("user", "Hi."), Turn("assistant", "How are you?"))
    made = template(GEMMA, bos_token="").render_pieces(turns)
    assert made.text.startswith(f"<start_of_turn>user\n{STAND_IN}<end_of_turn>\n<start_of_turn>model\nHello!")
    assert [made.text[a:b] for a, b in made.answers] == ["Hello!<end_of_turn>", "How are you?<end_of_turn>"]
    with_system = template(GEMMA, bos_token="").render_pieces((Turn("system", "Be kind."), *turns))
    assert with_system.text.startswith("<start_of_turn>user\nBe kind.<end_of_turn>")


def test_gemma_gets_neighbours_of_one_role_as_one_turn() -> None:
    turns = (Turn("user", "One."), Turn("user", "Two."), Turn("assistant", "Three."), Turn("assistant", "Four."))
    assert learned(GEMMA, turns) == ["Three.\nFour.<end_of_turn>"]


def test_chatml_keeps_chats_as_they_are() -> None:
    turns = (Turn("assistant", "Hello!"), Turn("user", "Hi."), Turn("assistant", "How are you?"), Turn("user", "Bye."))
    assert template(CHATML).arrange(turns) == turns[:3]


def test_a_template_that_drops_what_is_learned_is_refused() -> None:
    source = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="name another template, chatml say"):
        template(source).render_pieces(CHAT)


def test_a_template_that_is_no_jinja_is_one_sentence(tmp_path: Path, bytes_tokenizer: Any) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for %}", encoding="utf-8")
    codec = codec_of(bytes_tokenizer, str(path))
    with pytest.raises(ConfigError, match=r"the chat template mine\.jinja is not valid Jinja"):
        Encoder(codec, 64, "cut").template.render_pieces(CHAT)


# --- which template -------------------------------------------------------------------------------


def test_templates_by_name(bytes_tokenizer: Any, words_tokenizer: Any, tmp_path: Path) -> None:
    assert codec_of(bytes_tokenizer, None).template_name == Message("data.own-template")
    assert codec_of(bytes_tokenizer, "Gemma3").template == GEMMA
    mine = tmp_path / "mine.jinja"
    mine.write_text(BARE_CHATML, encoding="utf-8")
    assert codec_of(bytes_tokenizer, str(mine)).template == BARE_CHATML
    bare = codec_of(words_tokenizer, None)
    assert bare.template_name == "plain"
    assert bare.said == (Message("data.fallback-template", fallback="plain"),)
    with pytest.raises(ConfigError, match="there is no chat template 'chatlm': did you mean chatml"):
        codec_of(bytes_tokenizer, "chatlm")
    with pytest.raises(ConfigError, match=r"there is no chat template no/such\.jinja"):
        codec_of(bytes_tokenizer, "no/such.jinja")


def test_a_template_that_asks_for_the_date_gets_the_same_every_day() -> None:
    source = "{{ strftime_now('%d %b %Y') }}" + BARE_CHATML
    assert template(source).render(CHAT).startswith("26 Jul 2024")
    careful = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}1 May{% endif %}"
    assert template(careful).render(CHAT) == "1 May"
