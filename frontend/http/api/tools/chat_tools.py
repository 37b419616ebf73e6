"""Chat's fields of tools and thinking, read into a ToolUse and an OutputPlan."""

from typing import Any

from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.output_plan import OutputPlan, ParserNames, Thinking
from quire.frontend.http.api.tools.tool_use import Function, ToolUse, chosen, functions_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tokenizer import Tokenizer

_BUDGET = "thinking_token_budget"


def take_tools(body: ChatRequest) -> ToolUse | None:
    """What the request says of tools; the body keeps those that the prompt is to show. Raises ApiError 400."""
    if body.tool_choice is None and not (body.tools or body.functions or body.function_call):
        body.tools = None
        return None
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) and getattr(body, old) not in ("none", "auto"):
            raise ApiError(400, f"{old}: this field of older clients is not supported; use {new} instead.", param=old,
                           code="unsupported_value")  # fmt: skip
    tools, choice = body.tools or [], body.tool_choice
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise invalid(f"tools[{i}].type must be 'function'", f"tools[{i}].type")
    use = ToolUse("auto", functions_of([(f"tools[{i}].function", tool.get("function")) for i, tool in enumerate(tools)]),
                  body.parallel_tool_calls is not False)  # fmt: skip
    if isinstance(choice, dict):
        use = _chosen_by_object(use, choice)
    elif choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice must be 'none', 'auto', 'required' or an object that names a function", "tool_choice")
    elif choice == "required":
        use = ToolUse("required", use.functions, use.parallel)
    if not tools and use.mode != "auto":
        raise invalid("tool_choice needs tools", "tool_choice")
    if choice == "none" or not tools:
        body.tools = None
        return None
    if use.mode != "named":
        names = {function.name for function in use.functions}
        body.tools = [tool for tool in tools if tool["function"]["name"] in names]
    return use


def _chosen_by_object(use: ToolUse, choice: dict[str, Any]) -> ToolUse:
    """{"type": "function", "function": {"name": ...}}, or OpenAI's allowed_tools."""
    function, allowed = choice.get("function"), choice.get("allowed_tools")
    if choice.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str):
        return chosen(use, function["name"], "tool_choice.function.name")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
        return _allowed(use, allowed)
    raise invalid(
        "tool_choice must be 'none', 'auto', 'required', or an object as {'type': 'function', 'function': {'name': ...}}",
        "tool_choice",
    )


def _allowed(use: ToolUse, allowed: dict[str, Any]) -> ToolUse:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid("tool_choice.allowed_tools needs a mode, 'auto' or 'required', and a list of tools", "tool_choice")
    functions: list[Function] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        functions += chosen(use, str(name), f"tool_choice.allowed_tools.tools[{i}]").functions
    return ToolUse(mode, functions, use.parallel)


def chat_plan(
    names: ParserNames, body: ChatRequest, tools: ToolUse | None, tokenizer: Tokenizer, prompt: str
) -> OutputPlan | None:
    """How this request's output is read; None where it is plain text. prompt: its conversation as text."""
    if body.thinking_token_budget == -1:  # vLLM's way to ask for no limit
        body.thinking_token_budget = None
    template = tokenizer.template_source(body.chat_template or None, bool(body.tools))
    thinks = names.reasoning_parser(template) is not None
    if tools is None and not thinks and body.thinking_token_budget is None:
        return None
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        variables.setdefault("enable_thinking", False)
    budget = body.thinking_token_budget if body.thinking_token_budget is not None else variables.get(_BUDGET)
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise invalid(f"{_BUDGET} must be an integer", _BUDGET)
    thinking = Thinking(prompt, variables, _continued(body), budget)
    return OutputPlan(names, template, tokenizer, tools, thinking)


def _continued(body: ChatRequest) -> str | None:
    """The final message's text, if the model goes on with that."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
