"""Tokenizers: the one that ships, and those that do not fit a model."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tightfit.train.data.tokens import Encoder, codec_of, load_tokenizer, pad_id
from tightfit.types import ConfigError, ModelError

TEXT = "Zwölf Boxkämpfer 🥊\r\n\ttabs,  spaces, 你好, <|im_end|> and \x00."


def test_the_shipped_tokenizer_is_one_token_a_byte(tmp_path: Path) -> None:
    made = load_tokenizer(None, 512, trust_remote_code=False)
    ids = made("Zwölf 🥊")["input_ids"]
    assert len(ids) == len("Zwölf 🥊".encode())
    assert made.decode(made(TEXT)["input_ids"]) == TEXT
    assert len(made) <= 264
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT)["input_ids"] == made(TEXT)["input_ids"]
    assert again.decode(again(TEXT)["input_ids"]) == TEXT
    assert (again.eos_token, again.pad_token, again.chat_template) == (
        made.eos_token,
        made.pad_token,
        made.chat_template,
    )
    assert pad_id(made) == made.pad_token_id


def test_a_codec_says_the_same_as_its_tokenizer(words_tokenizer: Any) -> None:
    codec = codec_of(words_tokenizer, None)
    made = np.concatenate(list(Encoder(codec, 64, "cut").document(TEXT))).tolist()
    assert made == [*words_tokenizer(TEXT)["input_ids"], words_tokenizer.eos_token_id]
    assert codec.decode(codec.encode(TEXT)) == TEXT
    sent = ForkingPickler.loads(bytes(ForkingPickler.dumps(codec)))  # as another process gets it
    assert sent == codec
    assert sent.digest == codec.digest
    assert sent.encode(TEXT) == codec.encode(TEXT)


def test_a_limit_in_the_tokenizers_own_file_is_not_kept(words_tokenizer: Any, tmp_path: Path) -> None:
    words_tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(tree), encoding="utf-8")
    limited = load_tokenizer(str(tmp_path), 1000, trust_remote_code=False)
    assert len(codec_of(limited, None).encode("one two three " * 20)) > 40


def test_tokenizers_that_do_not_fit(words_tokenizer: Any, tmp_path: Path) -> None:
    words_tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path), 700, trust_remote_code=False)) == 700
    with pytest.raises(ConfigError, match="has 700 tokens but the model's vocabulary only 699"):
        load_tokenizer(str(tmp_path), 699, trust_remote_code=False)
    with pytest.raises(ConfigError, match="the shipped byte-level tokenizer has 260 tokens"):
        load_tokenizer(None, 128, trust_remote_code=False)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded from .*; name one with --tokenizer") as caught:
        load_tokenizer(str(tmp_path), 700, trust_remote_code=False)
    assert "\n" not in str(caught.value)
