"""Chooses the parser of a model's reasoning, and tells whether a prompt ends within reasoning.

A parser is chosen by vLLM's names, or by the tags in the model's chat template.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.frontend.text.reasoning_parsers.base import END, START, ReasoningParser
from quire.frontend.text.reasoning_parsers.deepseek_r1 import DeepSeekR1
from quire.frontend.text.reasoning_parsers.qwen3 import Qwen3

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1,
    "deepseek_v3": DeepSeekR1,
    "glm45": Qwen3,
    "kimi_k2": Qwen3,
    "minimax_m2": DeepSeekR1,
    "olmo3": Qwen3,
    "qwen3": Qwen3,
}

_SWITCHES = ("enable_thinking", "thinking")  # chat_template_kwargs


@lru_cache(maxsize=32)
def reasoning_parser_of(template: str) -> type[ReasoningParser] | None:
    """The parser for the tags in a chat template; None if it has none."""
    if END not in template:
        return None
    if "<｜Assistant｜>" in template:
        return DeepSeekR1
    return Qwen3 if START in template else None


def opened_by(prompt: str, variables: Mapping[str, Any], continued: str | None = None) -> bool | None:
    """Whether the output begins within reasoning (True) or after it (False); None if the prompt does not say.

    prompt: rendered by the template with these variables. continued: the final message's text, if the model continues it. Only
    the prompt's end counts, and not what a user has written.
    """
    if continued is not None:
        return continued.rfind(START) > continued.rfind(END)
    end = prompt[-256:].rstrip()
    if end.endswith(START):
        return True
    if end.endswith(END) or any(variables.get(name) is False for name in _SWITCHES):
        return False
    return None
