"""Our YAML against a reader of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.render.yaml_text import document

# Everything that an argument can hold: no surrogates, which are refused before, and no NUL.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, VALUES, min_size=1))
@settings(max_examples=60, deadline=None)
def test_a_reader_finds_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(document(value)) == value


@pytest.mark.parametrize(
    "word",
    [
        "yes",
        "No",
        "ON",
        "y",
        "null",
        "~",
        "",
        "1e3",
        "0x1f",
        "012",
        "1_000",
        "1:30",
        ".inf",
        "- a",
        "a: b",
        "#",
        "=",
        "<<",
    ],
)
def test_a_word_stays_a_word(word: str) -> None:
    assert yaml.safe_load(document({word: [word, {word: word}]})) == {word: [word, {word: word}]}


def test_it_reads_well() -> None:
    value: dict[str, Any] = {"kind": "Job", "on": True, "list": [{"a": 1, "b": [2]}, "--x"], "none": {}}
    text = 'kind: Job\n"on": true\nlist:\n  - a: 1\n    b:\n      - 2\n  - "--x"\nnone: {}\n'
    assert document(value) == text
