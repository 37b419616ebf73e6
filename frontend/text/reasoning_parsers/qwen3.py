"""Qwen3, QwQ and others with optional reasoning: it begins with `<think>`, which the model writes or the prompt ends with."""

from quire.frontend.text.reasoning_parsers.base import ReasoningParser


class Qwen3(ReasoningParser):
    needs_start = True
