"""Chooses the parser of a model's tool calls, by vLLM's names, or by the markers in the model's chat template."""

from functools import lru_cache

from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.deepseek_v3 import CALLS, DeepSeekV3
from quire.frontend.text.tool_parsers.granite import Granite
from quire.frontend.text.tool_parsers.hermes import Hermes
from quire.frontend.text.tool_parsers.llama3_json import Llama3Json
from quire.frontend.text.tool_parsers.mistral import Mistral
from quire.frontend.text.tool_parsers.pythonic import Pythonic
from quire.frontend.text.tool_parsers.qwen3_coder import Qwen3Coder

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV3,
    "granite": Granite,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen": Hermes,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "seed_oss": Qwen3Coder,
}

# The first line with all its texts in the template applies. Several formats use <tool_call>: those with more texts come first.
# None: a format that no parser here reads.
_SHOWN: tuple[tuple[type[ToolParser] | None, tuple[str, ...]], ...] = (
    (Mistral, ("[TOOL_CALLS]",)),
    (DeepSeekV3, (CALLS,)),
    (Qwen3Coder, ("<function=", "<parameter=")),
    (None, ("<tool_call>", "<arg_key>")),  # GLM-4.5
    (None, ("<tool_calls>[",)),  # a list, in Apriel's tags
    (Granite, ("<|tool_call|>",)),
    (Hermes, ("<tool_call>", "</tool_call>")),
    (Granite, ("<tool_call>", "<|start_of_role|>")),
    (Pythonic, ("func_name1(",)),
    (Llama3Json, ('"name":', '"parameters":', "<|start_header_id|>")),
    (Llama3Json, ('"name":', '"parameters":', "<|header_start|>")),  # Llama 4
    (Llama3Json, ("<|python_tag|>",)),
    (Pythonic, ("<|python_start|>",)),
)


@lru_cache(maxsize=32)
def tool_parser_of(template: str) -> type[ToolParser] | None:
    """The parser for the markers in a chat template; None if they are not known."""
    return next((parser for parser, texts in _SHOWN if all(text in template for text in texts)), None)
