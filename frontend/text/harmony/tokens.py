"""Harmony's markers: the special tokens that structure the output of gpt-oss, and how its texts show them to the parser.

A model may also write `<|end|>` in ordinary tokens, as text about the format. So in an output's text each marker stands as a
lone surrogate, which no text that is decoded from UTF-8 contains (`MARKS`). parser.py turns them back.
"""

from collections.abc import Mapping

import tokenizers

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
MARKS = {marker: chr(0xDC00 + i) for i, marker in enumerate(MARKERS)}
ENDS = frozenset(MARKS[marker] for marker in (END, RETURN, CALL))  # marks that end a message
_IN_TEMPLATES = (START, CHANNEL, MESSAGE)

# vLLM's names of its parsers for this format, in any case.
NAMES = frozenset(("gpt-oss", "gpt_oss", "gptoss", "harmony", "openai", "openai_gptoss"))


def is_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return all(marker in template for marker in _IN_TEMPLATES)


def marks_of(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """The ids of the markers, each with its mark. A tokenizer that lacks one has fewer."""
    ids = {backend.token_to_id(marker): mark for marker, mark in MARKS.items()}
    return {id: mark for id, mark in ids.items() if id is not None}


def spelled(text: str) -> str:
    """A text with its marks as markers."""
    return text.translate(_SPELLED)


_SPELLED: Mapping[int, str] = {ord(mark): marker for marker, mark in MARKS.items()}
