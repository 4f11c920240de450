"""A few words from a trained folder, with plain transformers: python examples/generate.py FOLDER [WORDS …]"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main(folder: str, words: list[str]) -> None:
    # For a few words it does not matter that a Mamba runs without its CUDA extensions here.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer(" ".join(words) or "One morning", return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=80, do_sample=False)
    print(tokenizer.decode(said[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
