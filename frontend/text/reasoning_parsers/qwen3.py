"""Qwen3, QwQ and others that think at will: a thought begins with `<think>`, which the model writes or the prompt ends with."""

from quire.frontend.text.reasoning_parsers.base import ReasoningParser


class Qwen3(ReasoningParser):
    needs_start = True
