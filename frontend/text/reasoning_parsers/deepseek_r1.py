"""DeepSeek R1 and V3.1: text before `</think>` is reasoning, with or without a start tag, unless the prompt has closed it."""

from quire.frontend.text.reasoning_parsers.base import ReasoningParser


class DeepSeekR1(ReasoningParser):
    needs_start = False
