"""Chooses the parser of a model's reasoning, and tells whether a prompt ends within reasoning.

A parser is chosen by vLLM's names, or by the tags in the model's chat template.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quire.frontend.text.reasoning_parsers.append_think import AppendThink
from quire.frontend.text.reasoning_parsers.base import END, START, ReasoningParser
from quire.frontend.text.reasoning_parsers.deepseek_r1 import DeepSeekR1
from quire.frontend.text.reasoning_parsers.framed import (
    CohereCommand3,
    CohereCommand4,
    Ernie45,
    Gemma4,
    Granite,
    HunyuanA13B,
    KimiK2,
    Mistral,
    SeedOss,
)
from quire.frontend.text.reasoning_parsers.qwen3 import Qwen3

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "cohere_command3": CohereCommand3,
    "cohere_command4": CohereCommand4,
    "deepseek_r1": DeepSeekR1,
    "deepseek_v3": DeepSeekR1,
    "ernie45": Ernie45,
    "gemma4": Gemma4,
    "glm45": Qwen3,
    "glm47": Qwen3,
    "granite": Granite,
    "holo2": DeepSeekR1,
    "hunyuan_a13b": HunyuanA13B,
    "hy_v3": Qwen3,
    "kimi_k2": KimiK2,
    "mimo": Qwen3,
    "minimax_m2": DeepSeekR1,
    "minimax_m2_append_think": AppendThink,
    "mistral": Mistral,
    "nano_v3": DeepSeekR1,
    "nemotron_nano_v2": DeepSeekR1,
    "nemotron_v3": DeepSeekR1,
    "olmo3": Qwen3,
    "poolside_v1": Qwen3,
    "qwen3": Qwen3,
    "seed_oss": SeedOss,
    "super_v3": DeepSeekR1,
}

# The first line with all its texts in the template applies.
_SHOWN: tuple[tuple[type[ReasoningParser], tuple[str, ...]], ...] = (
    (CohereCommand4, ("<|START_THINKING|>", "<|START_TEXT|>")),
    (CohereCommand3, ("<|START_THINKING|>",)),
    (Gemma4, ("<|channel>", "<channel|>")),
    (Mistral, ("[THINK]",)),
    (SeedOss, ("<seed:think>",)),
    (Granite, ("Here is my thought process:",)),
    (DeepSeekR1, ("<｜Assistant｜>", END)),
    (DeepSeekR1, ("<minimax:tool_call>", END)),
    (KimiK2, ("<|tool_call_begin|>", START, END)),
    (HunyuanA13B, ("<answer>", START, END)),
    (Granite, ("<|start_of_role|>", "<response>", START)),
    (Ernie45, ("<response>", START, END)),
    (Qwen3, (START, END)),
)
_SWITCHES = ("enable_thinking", "thinking")  # chat_template_kwargs


@lru_cache(maxsize=32)
def reasoning_parser_of(template: str) -> type[ReasoningParser] | None:
    """The parser for the tags in a chat template; None if it has none."""
    return next((parser for parser, texts in _SHOWN if all(text in template for text in texts)), None)


def opened_by(
    prompt: str, variables: Mapping[str, Any], continued: str | None = None, parser: type[ReasoningParser] = Qwen3
) -> bool | None:
    """Whether the output begins within reasoning (True) or after it (False); None if the prompt does not say.

    prompt: rendered by the template with these variables. continued: the final message's text, if the model continues it. Only
    the prompt's end counts, and not what a user has written.
    """
    if continued is not None:
        return max(map(continued.rfind, parser.starts)) > max(map(continued.rfind, parser.ends))
    end = prompt[-256:].rstrip()
    if end.endswith(parser.starts):
        return True
    if end.endswith(parser.ends) or any(variables.get(name) is False for name in _SWITCHES):
        return False
    return None
