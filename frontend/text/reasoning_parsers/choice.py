"""Which parser reads a model's reasoning, and whether a prompt leaves the model thinking.

By vLLM's names, or by the tags that the model's chat template shows.
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
    """The parser of the format that a chat template shows; None if it shows no thoughts."""
    if END not in template:
        return None
    if "<｜Assistant｜>" in template:
        return DeepSeekR1
    return Qwen3 if START in template else None


def opened_by(prompt: str, variables: Mapping[str, Any], continued: str | None = None) -> bool | None:
    """Whether the model thinks when it begins (True) or has done with it (False); None if the prompt does not say.

    prompt: as rendered by the template with these variables; continued: the final message's text, where the model goes on with
    that. Only the prompt's end counts: what a user has written does not.
    """
    if continued is not None:
        return continued.rfind(START) > continued.rfind(END)
    end = prompt[-256:].rstrip()
    if end.endswith(START):
        return True
    if end.endswith(END) or any(variables.get(name) is False for name in _SWITCHES):
        return False
    return None
