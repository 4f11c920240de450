"""A file that cannot be read: the sentence says what to write, and in which line."""

from __future__ import annotations

import pytest
import yaml

from tightfit.inputs.spelling import json_fault, without_comments, yaml_fault


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('{"a": 1\n "b": 2}', "write the comma that is missing, in line 1"),
        ('{"a": 1,\n, "b": 2}', "take out the second comma, in line 2"),
        ('{"a": 1, // why\n "b": tru}', "put the text in double quotes, in line 2"),
        ('{"a": True}', "write true, in line 1"),
        ("{'a': 1}", 'put the key in double quotes ("key"), in line 1'),
        ('{"a" 1}', "write a colon between the key and its value, in line 1"),
        ('{"a": }', "write the value that is missing, in line 1"),
        ('{"a": {"b": 1}\n', "close the bracket that is open, in line 1"),
        ('{"a": 1} }', "take out what follows the closing bracket, in line 1"),
        ('{"a": "x\n}', "close the quote before the line ends, in line 1"),
        ('{"a": .5}', "write a digit before the point, in line 1"),
        ('{\n"a": 1,\n}', "take out the comments and the commas before a closing bracket, first in line 2"),
    ],
)
def test_json(text: str, fix: str) -> None:
    assert str(json_fault(text)) == fix


def test_comments_go_and_text_stays() -> None:
    text = '{"a": "http://x#y",  # one\n /* two\n */ "b": [1, 2,]}'
    assert without_comments(text).split() == ['{"a":', '"http://x#y",', '"b":', "[1,", "2", "]}"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("a: b: c", "put text with a colon in it in quotes, or give the key above its own colon, in line 1"),
        ("a:\n\tb: 1", "indent with spaces instead of a tab, in line 2"),
        ("a: [1, 2", "write a comma there, or close the bracket, in line 1"),
        ("a:\n  b: 1\n c: 2", "begin the line as far in as the lines that it belongs to, in line 3"),
        ("a: 'x", "close the quote that was opened, in line 1"),
        ("a: @x", "put the value in quotes, in line 1"),
        ("a: \x01", "take out the characters that are no text"),
    ],
)
def test_yaml(text: str, fix: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load(text)
    assert str(yaml_fault(raised.value)) == fix
