"""A few words from a trained folder, with plain transformers: python examples/generate.py FOLDER [WORDS …]"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, words: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer(" ".join(words) or "One morning", return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=80, do_sample=False)
    print(tokenizer.decode(said[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
