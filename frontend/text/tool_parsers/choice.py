"""Chooses the parser of a model's tool calls, by vLLM's names, or by the markers in the model's chat template."""

from functools import lru_cache

from quire.frontend.text.tool_parsers.apertus import Apertus
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.deepseek_v3 import CALLS, DeepSeekV3
from quire.frontend.text.tool_parsers.gemma import FunctionGemma, Gemma4
from quire.frontend.text.tool_parsers.glm import Glm45, HyV3
from quire.frontend.text.tool_parsers.hermes import Hermes
from quire.frontend.text.tool_parsers.hunyuan import Hunyuan
from quire.frontend.text.tool_parsers.kimi_k2 import KimiK2
from quire.frontend.text.tool_parsers.lfm2 import Lfm2
from quire.frontend.text.tool_parsers.llama3_json import Llama3Json
from quire.frontend.text.tool_parsers.minimax_m2 import MiniMaxM2
from quire.frontend.text.tool_parsers.mistral import Mistral
from quire.frontend.text.tool_parsers.olmo3 import Olmo3
from quire.frontend.text.tool_parsers.pythonic import Pythonic
from quire.frontend.text.tool_parsers.qwen3_coder import Qwen3Coder
from quire.frontend.text.tool_parsers.tagged_json import (
    CohereCommand,
    GigaChat3,
    Granite,
    Granite20bFC,
    Longcat,
    Nemotron,
    Phi4Mini,
)
from quire.frontend.text.tool_parsers.xlam import Xlam

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": Apertus,
    "cohere_command3": CohereCommand,
    "cohere_command4": CohereCommand,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV3,
    "ernie45": Hermes,
    "functiongemma": FunctionGemma,
    "gemma4": Gemma4,
    "gigachat3": GigaChat3,
    "glm45": Glm45,
    "glm47": Glm45,
    "granite": Granite,
    "granite-20b-fc": Granite20bFC,
    "granite4": Hermes,
    "hermes": Hermes,
    "hunyuan_a13b": Hunyuan,
    "hy_v3": HyV3,
    "kimi_k2": KimiK2,
    "lfm2": Lfm2,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "llama4_pythonic": Pythonic,
    "longcat": Longcat,
    "mimo": Qwen3Coder,
    "minimax_m2": MiniMaxM2,
    "mistral": Mistral,
    "nemotron_json": Nemotron,
    "olmo3": Olmo3,
    "phi4_mini_json": Phi4Mini,
    "poolside_v1": Glm45,
    "pythonic": Pythonic,
    "qwen": Hermes,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "seed_oss": Qwen3Coder,
    "xlam": Xlam,
}

# The first line with all its texts in the template applies. Several formats use <tool_call>: those with more texts come first.
_SHOWN: tuple[tuple[type[ToolParser], tuple[str, ...]], ...] = (
    (Mistral, ("[TOOL_CALLS]",)),
    (DeepSeekV3, (CALLS,)),
    (KimiK2, ("<|tool_call_begin|>",)),
    (Lfm2, ("<|tool_call_start|>",)),
    (Lfm2, ("<|tool_list_start|>",)),
    (CohereCommand, ("<|START_ACTION|>",)),
    (Apertus, ("<|tools_prefix|>",)),
    (GigaChat3, ("function call<|role_sep|>",)),
    (FunctionGemma, ("<start_function_call>",)),
    (Gemma4, ("<|tool_call>", "<tool_call|>")),
    (MiniMaxM2, ("<minimax:tool_call>",)),
    (Longcat, ("<longcat_tool_call>",)),
    (HyV3, ("<arg_key>", "<tool_sep>")),
    (Glm45, ("<tool_call>", "<arg_key>")),
    (Qwen3Coder, ("<function=", "<parameter=")),
    (Hunyuan, ("<tool_calls>",)),  # also Apriel
    (Olmo3, ("<function_calls>", "</function_calls>")),
    (Granite20bFC, ("<function_call> ",)),
    (Nemotron, ("<TOOLCALL>",)),
    (Phi4Mini, ("functools[",)),
    (Phi4Mini, ("<|tool|>", "<|/tool|>")),
    (Granite, ("<|tool_call|>",)),
    (Hermes, ("<tool_call>", "</tool_call>")),
    (Granite, ("<tool_call>", "<|start_of_role|>")),
    (Xlam, ("tool_call_name",)),
    (Pythonic, ("func_name1(",)),
    (Llama3Json, ('"name":', '"parameters":', "<|start_header_id|>")),
    (Llama3Json, ('"name":', '"parameters":', "<|header_start|>")),  # Llama 4
    (Llama3Json, ("<|python_tag|>",)),
    (Pythonic, ("<|python_start|>",)),
    (Lfm2, ("List of tools: [",)),
)


@lru_cache(maxsize=32)
def tool_parser_of(template: str) -> type[ToolParser] | None:
    """The parser for the markers in a chat template; None if they are not known."""
    return next((parser for parser, texts in _SHOWN if all(text in template for text in texts)), None)
