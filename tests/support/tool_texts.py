"""Calls as models write them, in every format: `written` gives the text of some calls, which the format's parser must read."""

import json

from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS


def one(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def in_gemmas_way(value, quote):
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, list):
        return "[" + ",".join(in_gemmas_way(v, quote) for v in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{k if k.isidentifier() else quote + k + quote}:{in_gemmas_way(v, quote)}" for k, v in value.items())
        return "{" + ",".join(pairs) + "}"
    return json.dumps(value)


def in_python(name, arguments):
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def pairs(form, arguments):
    return "".join(form.format(k, json.dumps(v)) for k, v in arguments.items())


GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
MINIMAX = '<parameter name="{}">{}</parameter>\n'
QWEN = "<parameter={}>\n{}\n</parameter>\n"
GEMMA_QUOTE = '<|"|>'
CALLS = {  # by the parser's class: one call (its index, its name and its arguments)
    "Apertus": lambda i, n, a: json.dumps({n: a}),
    "CohereCommand": lambda i, n, a: json.dumps({"tool_call_id": str(i), "tool_name": n, "parameters": a}),
    "DeepSeekV3": lambda i, n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>",
    "FunctionGemma": lambda i, n, a: f"<start_function_call>call:{n}{in_gemmas_way(a, '<escape>')}<end_function_call>",
    "Gemma4": lambda i, n, a: f"<|tool_call>call:{n}{in_gemmas_way(a, GEMMA_QUOTE)}<tool_call|>",
    "GigaChat3": lambda i, n, a: f"function call<|role_sep|>\n{one(n, a)}",
    "Glm45": lambda i, n, a: f"<tool_call>{n}\n{pairs(GLM, a)}</tool_call>",
    "Granite": lambda i, n, a: one(n, a),
    "Granite20bFC": lambda i, n, a: f"<function_call> {one(n, a)}",
    "Hermes": lambda i, n, a: f"<tool_call>\n{one(n, a)}\n</tool_call>",
    "Hunyuan": lambda i, n, a: one(n, a),
    "HyV3": lambda i, n, a: f"<tool_call>{n}<tool_sep>\n{pairs(GLM, a)}</tool_call>",
    "KimiK2": lambda i, n, a: (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
    ),
    "Lfm2": lambda i, n, a: in_python(n, a),
    "Llama3Json": lambda i, n, a: one(n, a, "parameters"),
    "Longcat": lambda i, n, a: f"<longcat_tool_call>\n{one(n, a)}\n</longcat_tool_call>",
    "MiniMaxM2": lambda i, n, a: f'<invoke name="{n}">\n{pairs(MINIMAX, a)}</invoke>',
    "Mistral": lambda i, n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}",
    "Nemotron": lambda i, n, a: one(n, a),
    "Olmo3": lambda i, n, a: in_python(n, a),
    "Phi4Mini": lambda i, n, a: one(n, a),
    "Pythonic": lambda i, n, a: in_python(n, a),
    "Qwen3Coder": lambda i, n, a: f"<tool_call>\n<function={n}>\n{pairs(QWEN, a)}</function>\n</tool_call>",
    "Xlam": lambda i, n, a: one(n, a),
    "required": lambda i, n, a: one(n, a, "parameters"),
}
FRAMES = {  # what stands before, between and after calls, where it is not a line break between them
    "Apertus": ("<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "CohereCommand": ("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    "DeepSeekV3": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "Granite": ("<|tool_call|>[", ", ", "]"),
    "Hunyuan": ("<tool_calls>[", ", ", "]</tool_calls>"),
    "HyV3": ("<tool_calls>\n", "\n", "\n</tool_calls>"),
    "KimiK2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "Lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "Llama3Json": ("", "; ", ""),
    "MiniMaxM2": ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
    "Mistral": ("", "", ""),
    "Nemotron": ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "Olmo3": ("<function_calls>\n", "\n", "\n</function_calls>"),
    "Phi4Mini": ("functools[", ", ", "]"),
    "Pythonic": ("[", ", ", "]"),
    "Xlam": ("[", ", ", "]"),
    "required": ("[", ", ", "]"),
}


def written(name, calls):
    """Calls, (name, arguments) each, as a model of this format writes them."""
    kind = TOOL_PARSERS[name].__name__ if name != "required" else name
    before, between, after = FRAMES.get(kind, ("", "\n", ""))
    return before + between.join(CALLS[kind](i, n, a) for i, (n, a) in enumerate(calls)) + after
