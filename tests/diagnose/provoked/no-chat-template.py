# ruff: noqa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
words.pre_tokenizer = Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words).apply_chat_template([{"role": "user", "content": "a"}])
