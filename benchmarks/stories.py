"""The plain text that ships: short stories from a few hand-written pieces.

    python benchmarks/stories.py > src/tightfit/train/data/shipped/stories.txt

writes the file anew, always the same. It is meant for models of some hundred thousand weights: few words, plain
sentences and a plot that repeats, so that a minute on a CPU shows a loss that falls and words that come out right.
"""

from __future__ import annotations

import sys
from typing import TypeVar
from zlib import crc32

STORIES = 150

_T = TypeVar("_T")

WHO = (
    ("Anna", "she", "her"),
    ("Ben", "he", "his"),
    ("Clara", "she", "her"),
    ("Dan", "he", "his"),
    ("Emma", "she", "her"),
    ("Finn", "he", "his"),
    ("Grete", "she", "her"),
    ("Hugo", "he", "his"),
)
ANIMALS = ("dog", "cat", "goat", "duck", "hen", "horse", "mouse", "rabbit", "fox", "bear")
LOOKS = ("small", "old", "brown", "grey", "hungry", "quiet", "clever", "tired")
PLACES = ("the river", "the wood", "the hill", "the village", "the garden", "the old mill", "the lake", "the bridge")
THINGS = ("a red ball", "a loaf of bread", "a lamp", "a long rope", "a blue kite", "a basket of apples", "a warm coat")
WEATHER = (
    "The sun was shining",
    "It had rained all night",
    "A cold wind was blowing",
    "The first snow had come",
    "Fog lay over the fields",
    "It was a warm evening",
)
OPENINGS = (
    "One morning {name} went to {place} with {thing}.",
    "{name} lived in a little house near {place}.",
    "Once there was a child called {name}, who liked to walk to {place}.",
    "On the first day of the week {name} took {thing} and set out for {place}.",
)
MEETINGS = (
    "There {she} met a {look} {animal}.",
    "On the way {she} saw a {look} {animal} sitting under a tree.",
    "Behind a stone sat a {look} {animal} and looked at {name}.",
)
TROUBLES = (
    "“I have lost my way,” said the {animal}. “I do not know how to get home.”",
    "“My house has fallen into the water,” said the {animal}, and began to cry.",
    "“I am so hungry,” said the {animal}. “I have eaten nothing since yesterday.”",
    "“My brother is stuck in a hole,” said the {animal}, “and I am not strong enough to pull him out.”",
    "“Nobody wants to play with me,” said the {animal}.",
)
THOUGHTS = (
    "{name} thought about it for a while.",
    "{name} sat down beside the {animal} and said nothing at first.",
    "“Let me see,” said {name}, and looked into {her} bag.",
    "{name} had an idea.",
)
DEEDS = (
    "Then {she} gave the {animal} {thing}, and together they went on to {place}.",
    "“Come with me,” said {name}. “We will ask at {place}. Somebody there will know.”",
    "“We can do it together,” said {name}, and they did it together, one step after another.",
    "{name} called for help, and soon a {friend} came running from {place}.",
)
TURNS = (
    "It took them the whole day, but in the end all was well.",
    "At first it did not work, and they had to try again. The third time it worked.",
    "They walked and walked until the stars came out, and then they were there.",
    "When the {friend} saw them, it laughed and showed them the way.",
)
THANKS = (
    "“Thank you,” said the {animal}. “I will never forget what you have done.”",
    "The {animal} was so glad that it danced in a circle.",
    "“Now we are friends,” said the {animal}, and {name} was glad.",
)
ENDINGS = (
    "In the evening {name} went home and slept soundly.",
    "And from that day on they met at {place} every week.",
    "When {name} came home, the soup was still warm.",
    "That night {name} dreamt of a {look} {animal} with {thing}.",
)


def story(number: int) -> str:
    """Story `number`: which words it has follows from the number alone."""
    name, she, her = _pick(WHO, number, "who")
    animal = _pick(ANIMALS, number, "animal")
    words = {
        "name": name,
        "she": she,
        "her": her,
        "animal": animal,
        "friend": _pick(tuple(each for each in ANIMALS if each != animal), number, "friend"),
        "look": _pick(LOOKS, number, "look"),
        "place": _pick(PLACES, number, "place"),
        "thing": _pick(THINGS, number, "thing"),
    }
    first = (
        _pick(WEATHER, number, "weather") + ".",
        _pick(OPENINGS, number, "opening"),
        _pick(MEETINGS, number, "meet"),
    )
    middle = (_pick(TROUBLES, number, "trouble"), _pick(THOUGHTS, number, "thought"), _pick(DEEDS, number, "deed"))
    last = (_pick(TURNS, number, "turn"), _pick(THANKS, number, "thanks"), _pick(ENDINGS, number, "ending"))
    return "\n".join(" ".join(part).format(**words) for part in (first, middle, last))


def text() -> str:
    """All stories."""
    return "\n\n".join(story(number) for number in range(STORIES)) + "\n"


def _pick(choices: tuple[_T, ...], number: int, what: str) -> _T:
    return choices[crc32(f"{what} {number}".encode()) % len(choices)]


if __name__ == "__main__":
    sys.stdout.write(text())
