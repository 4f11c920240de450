# ruff: noqa
from transformers.utils import requires_backends


class SpeechTokenizer:
    def __init__(self):
        requires_backends(self, ["sentencepiece"])


SpeechTokenizer()
