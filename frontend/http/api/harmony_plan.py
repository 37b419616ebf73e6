"""HarmonyPlan: how the output of gpt-oss is parsed: reasoning, content and calls in one format. Other models have OutputPlan.

output_plan.chat_plan makes one where the chat template writes this format. The parser reads the format's markers by token id
(text/harmony/). A grammar describes whole outputs (tools/harmony_grammar.py), so what a request asks for applies to the channel
`final`, and to calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.frontend.client.outputs import Delta
from quire.frontend.client.stream import Stream
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.tools.custom_tools import with_custom_calls
from quire.frontend.http.api.tools.harmony_grammar import harmony_grammar
from quire.frontend.http.api.tools.tool_use import ToolUse
from quire.frontend.text.custom_calls import Parser
from quire.frontend.text.harmony.header import read_header
from quire.frontend.text.harmony.parser import HarmonyParser
from quire.frontend.text.harmony.tokens import END, ENDS, MARKS, MESSAGE, START, marks_of
from quire.frontend.text.output_events import Reasoning
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.structured_outputs import StructuredOutputs

_MAX_HEADER = 256  # tokens
_THOUGHT = "<|channel|>analysis<|message|>"


class HarmonyPlan:
    """tools: None if the model has none to call. continues: the prompt ends within the text of an answer."""

    has_reasoning = True

    def __init__(self, tokenizer: Tokenizer, tools: ToolUse | None, token_budget: int | None, continues: bool) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._budget = token_budget
        self._continues = continues
        self._marks = marks_of(tokenizer.backend)
        if continues and tools is not None and tools.mode != "auto":
            raise invalid("tool_choice: an answer that goes on with the last message cannot be a call", "tool_choice")

    @property
    def max_calls(self) -> int | None:
        return 1 if self._tools is not None and self._tools.parallel is False else None

    # --------------------------------------------------------------------------------------------------- for the engine
    def sampling_fields(self, own: StructuredOutputs | None) -> dict[str, Any]:
        """See OutputPlan. A grammar leaves no room for a budget of reasoning: it applies from the first token on."""
        grammar = own if self._continues else harmony_grammar(self._tools, own)
        budget = self._budget if grammar is None and not self._continues else None
        encode = self._tokenizer.encode
        return {
            "structured_outputs": grammar,
            "thinking_token_budget": budget,
            "reasoning_end_token_ids": None if budget is None else encode(END, add_special_tokens=False),
            "reasoning_start_token_ids": None if budget is None else encode(_THOUGHT, add_special_tokens=False),
        }

    @property
    def marker_ids(self) -> frozenset[int]:
        return frozenset(self._marks)

    def show_markers(self, stream: Stream) -> None:
        """Mark the format's tokens in the text. To be called right after submitting."""
        stream.mark_tokens(self._marks)

    # --------------------------------------------------------------------------------------------------- for the answer
    def new_parser(self) -> Parser:
        """A new parser, for one of the request's sequences."""
        return with_custom_calls(HarmonyParser(self._tools is not None, self._continues), self._tools)

    def new_reasoning_count(self) -> "HarmonyReasoningCount":
        return HarmonyReasoningCount(self._tokenizer, self._marks, self._continues)


@dataclass(slots=True)
class _Message:
    """A choice's open message. header: its pieces so far; None within its content. size: its tokens so far."""

    header: list[str] | None
    is_first: bool = True
    is_reasoning: bool = False
    size: int = 0


class HarmonyReasoningCount:
    """Counts the tokens of messages that are reasoning, with their headers and ends (see ReasoningCount)."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str], continues: bool) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._continues = continues
        self._open: dict[int, _Message] = {}  # by choice

    def add(self, run: PromptRun, delta: Delta, never_reasoned: bool) -> None:
        if run.num_reasoning_tokens is None:
            run.num_reasoning_tokens = [0] * len(run.num_tokens)
        i = delta.index
        if i not in self._open:
            self._open[i] = _Message(None if self._continues else [])
        for token_id in delta.token_ids:
            run.num_reasoning_tokens[i] += self._count(self._open[i], token_id)

    def _count(self, message: _Message, token_id: int) -> int:
        """How many more tokens of reasoning there are, now that this one has come."""
        mark = self._marks.get(token_id)
        message.size += 1
        if mark in ENDS:
            counted = int(message.is_reasoning)
            message.header, message.is_first, message.is_reasoning, message.size = [], False, False, 0
            return counted
        if message.header is None:
            return int(message.is_reasoning)
        if mark == MARKS[MESSAGE]:
            header = read_header("".join(message.header), message.is_first)
            message.header, message.is_reasoning = None, header.kind is Reasoning
            return message.size if message.is_reasoning else 0
        if mark != MARKS[START] and len(message.header) < _MAX_HEADER:
            message.header.append(mark or self._tokenizer.token_str(token_id))
        return 0
