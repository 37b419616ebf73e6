"""OutputPlan: how one request's output is parsed: its parsers, the grammar that they rely on, the special tokens they must see.

`chat_plan` makes one from a ChatRequest. `ParserNames` chooses the parsers: by name, or by the model's chat template. A request
without tools and reasoning has no plan, and stays on the fast path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.frontend.client.stream import Stream
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.harmony_plan import HarmonyPlan
from quire.frontend.http.api.reasoning_count import ReasoningCount
from quire.frontend.http.api.tools.custom_tools import function_of, is_custom, kept_tools, name_of, with_custom_calls
from quire.frontend.http.api.tools.tool_grammar import answer_or_calls, tool_grammar
from quire.frontend.http.api.tools.tool_use import Function, ToolUse, chosen, functions_of
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.custom_calls import Parser
from quire.frontend.text.harmony.tokens import NAMES, is_harmony
from quire.frontend.text.output_parser import OutputParser
from quire.frontend.text.reasoning_parsers.base import ReasoningParser
from quire.frontend.text.reasoning_parsers.choice import REASONING_PARSERS, opened_by, reasoning_parser_of
from quire.frontend.text.tokenizer import ChatPrompt, Tokenizer
from quire.frontend.text.tool_parsers.base import ToolParser
from quire.frontend.text.tool_parsers.choice import TOOL_PARSERS, tool_parser_of
from quire.frontend.text.tool_parsers.forced import NamedCall, RequiredCalls
from quire.ipc.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class ParserNames:
    """--tool-call-parser and --reasoning-parser: a name, "auto" (by the chat template) or "none"."""

    tool_call: str = "auto"
    reasoning: str = "auto"

    def is_harmony(self, template: str) -> bool:
        """Whether outputs have gpt-oss's format: by a name of it, or by the template, unless neither parser is wanted."""
        names = {self.tool_call.lower(), self.reasoning.lower()}
        return bool(names & NAMES) or ("auto" in names and is_harmony(template))

    def tool_parser(self, template: str) -> type[ToolParser] | None:
        return tool_parser_of(template) if self.tool_call == "auto" else TOOL_PARSERS.get(self.tool_call)

    def reasoning_parser(self, template: str) -> type[ReasoningParser] | None:
        return reasoning_parser_of(template) if self.reasoning == "auto" else REASONING_PARSERS.get(self.reasoning)


@dataclass(frozen=True)
class Thinking:
    """A request's and its prompt's say on reasoning. prompt, variables, continued: see reasoning_parsers/choice.py.

    token_budget: the most tokens of reasoning.
    """

    prompt: str
    variables: Mapping[str, Any]
    continued: str | None = None
    token_budget: int | None = None


class OutputPlan:
    """tools: None if the model has none to call. template: the chat template's source. Raises ApiError 400."""

    def __init__(
        self, names: ParserNames, template: str, tokenizer: Tokenizer, tools: ToolUse | None, thinking: Thinking
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._tool_parser = self._find_tool_parser(names, template) if tools is not None else None
        self._grammar = tool_grammar(tools, self._tool_parser) if tools is not None else None
        self._budget = thinking.token_budget
        self._reasoning = names.reasoning_parser(template)
        if self._reasoning is None and self._budget is not None:
            raise ApiError(
                400,
                "thinking_token_budget needs a reasoning model: the chat template of this one shows no thoughts that are known "
                "here; see --reasoning-parser.",
                param="thinking_token_budget",
                code="unsupported_value",
            )
        self._opened: bool | None = False
        self._always_reasons = False  # unless the prompt says otherwise
        if self._reasoning is not None:
            self._opened = opened_by(thinking.prompt, thinking.variables, thinking.continued, self._reasoning)
            named = names.reasoning != "auto"
            self._always_reasons = named or not self._reasoning.needs_start or "enable_thinking" in template

    def _find_tool_parser(self, names: ParserNames, template: str) -> type[ToolParser] | None:
        assert self._tools is not None
        parser = names.tool_parser(template)
        if parser is None and self._tools.mode == "auto":
            raise ApiError(
                400,
                "tools: with tool_choice 'auto' the server must know how this model writes calls, which its chat template does "
                f"not show; start the server with --tool-call-parser and one of {', '.join(TOOL_PARSERS)}, or use tool_choice "
                "'required' or a function.",
                param="tool_choice",
                code="unsupported_value",
            )
        return parser

    @property
    def has_reasoning(self) -> bool:
        return self._reasoning is not None

    @property
    def may_think(self) -> bool:
        return self._opened is not False

    @property
    def max_calls(self) -> int | None:
        return 1 if self._tools is not None and self._tools.parallel is False else None

    # --------------------------------------------------------------------------------------------------- for the engine
    def sampling_fields(self, own: StructuredOutputs | None) -> dict[str, Any]:
        """Fields of SamplingParams: the grammar that the calls need, and the token ids that end the reasoning before it.

        own: the grammar that the request asks for by itself. Raises ApiError 400.
        """
        grammar = self._grammar_beside(own)
        budget = self._budget if self.may_think else None
        thinks = budget is not None or (grammar is not None and self._reasons_first())
        ends, starts = (self._end_ids(), self._start_ids()) if thinks else (None, None)
        return {
            "structured_outputs": grammar,
            "thinking_token_budget": budget,
            "reasoning_end_token_ids": ends,
            "reasoning_start_token_ids": starts,
        }

    def _reasons_first(self) -> bool:
        """Whether a grammar starts only when reasoning has ended. Without reasoning it would wait for ever, so it waits only if
        the prompt opens reasoning, one token tells that it begins, or the operator has named the parser. The engine does not
        recognize a start of several tokens."""
        if self._reasoning is None or self._opened is not None:
            return bool(self._opened)
        return self._always_reasons or len(self._start_ids() or ()) == 1

    def _grammar_beside(self, own: StructuredOutputs | None) -> StructuredOutputs | None:
        if own is None:
            return self._grammar
        is_json = own.kind in ("json", "json_object")
        if is_json and own.field.startswith("response_format") and self._tools is not None and self._tools.mode == "auto":
            assert self._tool_parser is not None
            return answer_or_calls(own, self._tools, self._tool_parser)  # as OpenAI does; agents send both
        if self._grammar is None:
            return own
        if self._tools is not None and self._tools.mode == "auto":
            return own  # another format leaves no room for calls
        if is_json:
            return self._grammar  # an answer that must be a call has no content for response_format, as with OpenAI
        raise invalid(
            "tool_choice: a call that must be made and another format of the answer exclude each other", "tool_choice"
        )

    def _end_ids(self) -> list[int]:
        assert self._reasoning is not None
        return self._tokenizer.encode(self._reasoning.ends[0], add_special_tokens=False)

    def _start_ids(self) -> list[int] | None:
        """Token ids that begin reasoning; None if the model reasons from its first token on."""
        assert self._reasoning is not None
        if self._opened is not None or not self._reasoning.needs_start:
            return None
        return self._tokenizer.encode(self._reasoning.starts[0], add_special_tokens=False)

    @property
    def marker_ids(self) -> frozenset[int]:
        """Special tokens that the parsers must see."""
        texts = [*(self._tool_parser.special if self._tool_parser is not None else ())]
        texts += self._reasoning.tags() if self._reasoning is not None else ()
        ids = {self._tokenizer.backend.token_to_id(text) for text in texts} & self._tokenizer.special_ids
        return frozenset(i for i in ids if i is not None)

    def show_markers(self, stream: Stream) -> None:
        """Keep the parsers' markers in the text, even if they are special tokens. To be called right after submitting."""
        if ids := self.marker_ids:
            stream.show_special_tokens(ids)

    # --------------------------------------------------------------------------------------------------- for the answer
    def new_parser(self) -> Parser:
        """A new parser, for one of the request's sequences."""
        reasoning = self._reasoning(self._opened) if self._reasoning is not None else None
        return with_custom_calls(OutputParser(reasoning, self._new_tool_parser()), self._tools)

    def _new_tool_parser(self) -> ToolParser | None:
        if self._tools is None:
            return None
        if self._tool_parser is not None:
            schemas = {function.name: function.parameters for function in self._tools.functions}
            return self._tool_parser(schemas, is_forced=self._tools.mode != "auto")
        return NamedCall(self._tools.functions[0].name) if self._tools.mode == "named" else RequiredCalls()

    def new_reasoning_count(self) -> ReasoningCount:
        return ReasoningCount(self.reasoning_end_id)

    @property
    def reasoning_end_id(self) -> int | None:
        """The token that ends reasoning; None if the output has no reasoning, or several tokens end it."""
        if self._reasoning is None or not self.may_think:
            return None
        return self._tokenizer.backend.token_to_id(self._reasoning.ends[0])


# ------------------------------------------------------------------------------------------------------------- chats
_BUDGET = "thinking_token_budget"
Plan = OutputPlan | HarmonyPlan


def take_tools(body: ChatRequest) -> ToolUse | None:
    """The request's tools and how they may be called. The body keeps those that the prompt shows. Raises ApiError 400."""
    if body.tool_choice is None and not (body.tools or body.functions or body.function_call):
        body.tools = None
        return None
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) and getattr(body, old) not in ("none", "auto"):
            raise ApiError(400, f"{old}: this field of older clients is not supported; use {new} instead.", param=old,
                           code="unsupported_value")  # fmt: skip
    kept, choice = kept_tools(body.tools or []), body.tool_choice
    tools = [tool for _, tool in kept]
    use = ToolUse("auto", functions_of([_function(i, tool) for i, tool in kept]), body.parallel_tool_calls)
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
        body.tools = [tool for tool in tools if name_of(tool) in names]
    return use


def _function(i: int, tool: dict[str, Any]) -> tuple[str, Any, bool]:
    """A tool as `functions_of` takes it."""
    if not is_custom(tool):
        return f"tools[{i}].function", tool.get("function"), False
    return f"tools[{i}].custom", function_of(tool["custom"], f"tools[{i}].custom"), True


def _chosen_by_object(use: ToolUse, choice: dict[str, Any]) -> ToolUse:
    """tool_choice as an object: {"type": "function", "function": {"name": ...}}, the same of a custom tool, or OpenAI's
    allowed_tools."""
    allowed = choice.get("allowed_tools")
    if (kind := choice.get("type")) in ("function", "custom") and (name := _chosen_name(choice)) is not None:
        return chosen(use, name, f"tool_choice.{kind}.name")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
        return _allowed(use, allowed)
    raise invalid(
        "tool_choice must be 'none', 'auto', 'required', or an object as {'type': 'function', 'function': {'name': ...}}",
        "tool_choice",
    )


def _chosen_name(tool: Any) -> str | None:
    """The name in {"type": "function", "function": {"name": ...}}, or in the same of a custom tool."""
    inner = tool.get("custom" if tool.get("type") == "custom" else "function") if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _allowed(use: ToolUse, allowed: dict[str, Any]) -> ToolUse:
    tools = allowed.get("tools")
    mode: Any = "auto" if allowed.get("mode") is None else allowed["mode"]
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise invalid("tool_choice.allowed_tools needs a mode, 'auto' or 'required', and a list of tools", "tool_choice")
    functions: dict[str, Function] = {}  # one that is named twice is allowed once
    for i, tool in enumerate(tools):
        (function,) = chosen(use, str(_chosen_name(tool)), f"tool_choice.allowed_tools.tools[{i}]").functions
        functions[function.name] = function
    return ToolUse(mode, list(functions.values()), use.parallel)


def chat_plan(
    names: ParserNames,
    body: ChatRequest,
    tools: ToolUse | None,
    tokenizer: Tokenizer,
    prompt: ChatPrompt,
    thinks: bool = True,
    may_not_reason: bool = False,
) -> Plan | None:
    """How this request's output is parsed; None if it is plain text. thinks: False if the model must not reason.

    may_not_reason: a budget for reasoning is taken with a model that does not reason, too, and has no effect there.
    """
    if body.thinking_token_budget == -1:  # means no limit, as in vLLM
        body.thinking_token_budget = None
    if names.is_harmony(prompt.template):
        return HarmonyPlan(tokenizer, tools, body.thinking_token_budget, bool(body.continue_final_message))
    can_think = names.reasoning_parser(prompt.template) is not None
    if can_think and not thinks:
        body.thinking_token_budget = 0  # for templates without a switch for it
    if not can_think and may_not_reason:
        body.thinking_token_budget = None
    if tools is None and not can_think and body.thinking_token_budget is None:
        return None
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort == "none":
        variables.setdefault("enable_thinking", False)
    budget = body.thinking_token_budget if body.thinking_token_budget is not None else variables.get(_BUDGET)
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise invalid(f"{_BUDGET} must be an integer", _BUDGET)
    thinking = Thinking(prompt.text, variables, _continued(body), budget)
    return OutputPlan(names, prompt.template, tokenizer, tools, thinking)


def _continued(body: ChatRequest) -> str | None:
    """The final message's text, if the model continues it."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
