# ruff: noqa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

words = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
tokenizer.chat_template = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% endfor %}"
)
tokenizer.apply_chat_template([{"role": "assistant", "content": "a"}], tokenize=False)
