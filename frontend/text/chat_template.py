"""Chat templates: messages to prompt text, with jinja2's immutable sandbox and the environment of Hugging Face templates.

Globals, filters and extensions are those that `transformers` documents for templates: raise_exception, strftime_now, tojson
without HTML escapes, loop controls, and the `generation` tag (which marks text for training and is ignored here). A template
sees plain JSON data only. Any failure in a template is the request's error: `ChatTemplateError`, a ValueError.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from jinja2 import nodes

from quire.frontend.text.custom_calls import INPUT
from quire.frontend.text.harmony.messages import harmony_messages, harmony_tools, harmony_variables
from quire.frontend.text.harmony.tokens import is_harmony

MAX_RENDERED_CHARS = 64 << 20
MAX_ARGUMENT_MARKS = 1 << 17  # commas and brackets in the arguments of one tool call: each may stand for a value
_LARGE_VALUE = 10_000
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # a trailing space shows whether the template trims

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that clients and templates use
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", *_REASONING)

Message = dict[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ChatTemplateError(ValueError):
    """The template cannot render this conversation; the text is for the client."""


class ChatTemplate:
    """One compiled template. `special_tokens`: bos_token, eos_token, ... as its variables.

    content_format: the form of a message's content: "string", or "openai" for a template that loops over a list of parts. If it
    is not given, the template's source determines it.
    placeholders: kinds of media that messages may hold, as parts {"type": kind}, each with the text that stands for one in a
    template of strings.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        content_format: str | None = None,
        placeholders: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.source = source
        self._placeholders = placeholders
        self._is_harmony = is_harmony(source)
        self._special_tokens = special_tokens
        self._template, self.content_format, self._takes_both, self._joins_arguments, self._tests_for_none = _compile(source)
        if content_format in ("string", "openai"):
            self.content_format, self._takes_both = content_format, False

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = _NOTHING,
    ) -> str:
        """The prompt text. `variables` (chat_template_kwargs) override special tokens of the same name.

        continue_final_message leaves the last message open, so the model continues it. add_generation_prompt opens the
        assistant's turn; the two exclude each other. Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in variables:
                raise ChatTemplateError(f"chat_template_kwargs must not hold {name!r}")
        if not isinstance(messages, list):
            raise ChatTemplateError("messages must be a list")
        prepared = [self._prepare(m, i) for i, m in enumerate(_plain(messages, "messages"))]
        if self._is_harmony:
            prepared, tools, variables = harmony_messages(prepared), harmony_tools(tools), harmony_variables({**variables})
        final_text = _tag_final_message(prepared) if continue_final_message else ""
        values = {
            **self._special_tokens,
            **_plain(dict(variables), "chat_template_kwargs"),
            "messages": prepared,
            "tools": _plain(tools, "tools") or None,
            "documents": _plain(documents, "documents") or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(values)
        except ChatTemplateError:
            if not self._tests_for_none or all("content" in message for message in prepared):
                raise
            # DeepSeek V3's template joins a content that is not none to a text, and an absent one is not none
            text = self._render({**values, "messages": [{"content": None, **message} for message in prepared]})
        return _cut_at_tag(text, final_text) if continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        parts, size = [], 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    break
        except jinja2.TemplateError as error:  # from raise_exception, an undefined name, or the sandbox
            raise ChatTemplateError(f"the chat template refused the conversation: {error}") from error
        except Exception as error:  # the template's expressions may raise anything
            raise ChatTemplateError(f"the chat template failed on the conversation: {type(error).__name__}: {error}") from error
        if size > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the rendered chat template is longer than {MAX_RENDERED_CHARS} characters")
        return "".join(parts)

    def _prepare(self, message: Any, index: int) -> Message:
        try:
            return self._prepared(message)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"message {index}: {error}") from error

    def _prepared(self, message: Any) -> Message:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatTemplateError("each message must be an object with a role")
        prepared = {
            key: value for key, value in message.items() if value is not None
        }  # null means absent; templates print None
        if not message.get("tool_calls"):
            prepared.pop("tool_calls", None)  # answers have an empty list, which some templates treat as calls
        if "content" not in prepared:
            if message["role"] != "assistant":
                raise ChatTemplateError("each message must have a content, but for an assistant's")
            if not any(message.get(name) for name in _INSTEAD_OF_CONTENT):
                prepared["content"] = ""  # an answer that was cut off before its first token, sent back
        if "content" in prepared:
            prepared["content"] = self._content(prepared["content"])
        reasoning = next((message[k] for k in _REASONING if message.get(k)), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        if "tool_calls" in prepared:
            prepared["tool_calls"] = _calls(prepared["tool_calls"], self._joins_arguments)
        return prepared

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            wrap = self.content_format == "openai" and not self._takes_both
            return [{"type": "text", "text": content}] if wrap else content
        if not isinstance(content, list):
            raise ChatTemplateError("a message's content must be a text, a list of parts or null")
        parts = [self._part(part) for part in content]
        return parts if self.content_format == "openai" else "\n".join(part["text"] for part in parts)

    def _part(self, part: Any) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in self._placeholders:
            return _text_part(part)
        return {"type": kind} if self.content_format == "openai" else {"text": self._placeholders[kind]}


def _plain(value: Any, what: str) -> Any:
    """A copy with JSON types only: a sandbox must not see objects with methods of their own."""
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{what} must be plain JSON data") from error


def _text_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        if isinstance(part.get("text"), str):
            return {**part, "type": "text"}
    elif isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    kind = part.get("type") if isinstance(part, dict) else None
    raise ChatTemplateError(f"this model takes text only; a message's content holds a part of type {str(kind)[:40]!r}")


def _calls(calls: Any, as_text: bool) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ChatTemplateError("its tool_calls must be a list of objects, each with a function")
    return [_with_arguments(call, as_text) for call in calls]


def _with_arguments(call: dict[str, Any], as_text: bool) -> Any:
    """OpenAI sends a call's arguments as a JSON string; most templates want the object, some concatenate the string.

    Arguments that are not a JSON object become an empty one, as in vLLM: a model may have written them, and agents send them
    back in every turn, with the tool's error.
    """
    function, custom = call.get("function"), call.get("custom")
    if isinstance(custom, dict) and isinstance(custom.get("input"), str):  # towards a model, a function with one argument
        call = {**{key: value for key, value in call.items() if key != "custom"}, "type": "function"}
        function = {"name": custom.get("name"), "arguments": {INPUT: custom["input"]}}
    if not isinstance(function, dict):
        if call.get("type") not in (None, "function"):
            raise ChatTemplateError(f"its tool_calls must be of type 'function', got {str(call['type'])[:40]!r}")
        return call
    given = function.get("arguments")
    if isinstance(given, str) and sum(map(given.count, ",[{")) > MAX_ARGUMENT_MARKS:
        raise ChatTemplateError(f"the arguments of a tool call may hold at most {MAX_ARGUMENT_MARKS} commas and brackets")
    try:
        arguments = json.loads(given or "{}") if given is None or isinstance(given, str) else given
    except ValueError:
        arguments = None
    except RecursionError as error:
        raise ChatTemplateError("the arguments of a tool call are nested too deeply") from error
    if not isinstance(arguments, dict):
        arguments = {}
    if as_text:
        arguments = given if isinstance(given, str) and given else _tojson(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _tag_final_message(messages: list[Message]) -> str:
    """Append a tag to the last message's text. Returns the text without it."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return content
    if isinstance(content, list) and content and "text" in content[-1]:
        text = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_TAG
        return text
    raise ChatTemplateError("continue_final_message needs a final message with a text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    mark = text.rfind(_CONTINUE_TAG.strip())
    if mark < 0 or final_text.strip() not in text:
        raise ChatTemplateError("continue_final_message: the chat template does not show the final message as it is")
    kept = text[:mark]
    return kept if text.startswith(_CONTINUE_TAG, mark) else kept.rstrip()


# -------------------------------------------------------------------------------------------------- the environment
class _IgnoreGeneration(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %}, which renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _SafeNamespace(jinja2.utils.Namespace):
    """jinja's namespace() without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace cannot hold names that begin with an underscore")


class _Dict:
    """`dict` for templates: only a call and `fromkeys`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # `encode` runs in C and blocks the interpreter (100 ms for 10 MB); `iterencode` runs in Python and takes four times as long
    return "".join(encoder.iterencode(value)) if _is_large(value) else encoder.encode(value)


def _is_large(value: Any) -> bool:
    """Whether JSON data has more than _LARGE_VALUE values."""
    todo, count = [value], 0
    while todo and count <= _LARGE_VALUE:
        item = todo.pop()
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, list):
            count += len(item)
            todo += item if len(item) <= _LARGE_VALUE else ()
    return count > _LARGE_VALUE


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_IgnoreGeneration, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_SafeNamespace
    )  # fmt: skip
    return env


@lru_cache(maxsize=32)
def _compile(source: str) -> tuple[jinja2.Template, str, bool, bool, bool]:
    """The template, its content format, whether it distinguishes a string from a list itself, whether it concatenates a call's
    arguments as a string, and whether it tests if a content is none."""
    env = _environment()
    try:
        tree = env.parse(source)
        template = env.from_string(source)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:  # Python raises the last two
        raise ChatTemplateError(f"the chat template is not valid: {error}") from error
    # jinja2 copies the globals for every rendering; copying its own chain of mappings took 5 us of a short request's 60
    template.globals = dict(template.globals)
    loops = any(_is_called("content", loop.iter) for loop in tree.find_all(nodes.For))
    joins = any(_is_called("arguments", side, False) for add in tree.find_all(nodes.Add) for side in (add.left, add.right))
    tests = {test.name for test in tree.find_all(nodes.Test)}
    takes_both = bool(tests & {"string", "iterable", "sequence", "mapping"})
    asks = any(test.name == "none" and _is_called("content", test.node) for test in tree.find_all(nodes.Test))
    return template, "openai" if loops else "string", takes_both, joins, asks


def _is_called(name: str, node: nodes.Node, with_filters: bool = True) -> bool:
    """Whether an expression has this name: message.content, message['content'] or content, perhaps with filters."""
    while with_filters and isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getattr(attr=found) | nodes.Name(name=found) | nodes.Getitem(arg=nodes.Const(value=found)):
            return bool(found == name)
    return False
