"""Marks of a prompt: places in its text after which other prompts may go on, for engines that keep recurrent states there.

A place is a number of messages, and its mark the length of what the template renders for these alone, if the whole prompt
begins with that. A place within a message's parts has the number of messages before it and of its parts; its mark is where the
rendering begins to differ if something else follows these. `places` chooses them, `render_marked` renders them, and
Tokenizer.encode_marked counts their tokens. Engines without states want no marks, and then nothing is rendered twice.
"""

import bisect
import time
from collections.abc import Sequence
from typing import Any

from quire.frontend.text.chat_template import ChatTemplate, ChatTemplateError, Message

MOST = 8
CACHE_CONTROL = "cache_control"  # Anthropic's field of a content block; of a message: its last block has it
SLOW_S = 0.1  # a conversation that takes longer to render has no marks
_SYSTEM = ("system", "developer")
_ANYTHING = "\ue000"  # stands for any text
_OTHER: Message = {"role": "user", "content": _ANYTHING}  # for any message

Place = int | tuple[int, int]


def places(messages: Any, has_tools: bool) -> list[Place]:
    """After tools and system prompt, before the last message, and behind what has cache_control, the last ones first."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []  # an error of the rendering
    first = next((i for i, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))
    wanted: list[Place] = [first] if first or has_tools else []
    wanted += [len(messages) - 1] if len(messages) > 1 else []
    for i in reversed(range(len(messages))):
        wanted += _marked(messages[i], i)
    return list(dict.fromkeys(wanted))[:MOST]


def _marked(message: Message, i: int) -> list[Place]:
    """The places behind message i and behind its parts, the last one first, that have cache_control."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    marked = [j + 1 for j, part in enumerate(parts) if isinstance(part, dict) and part.get(CACHE_CONTROL)]
    found: list[Place] = [i + 1 if count == len(parts) else (i, count) for count in reversed(marked)]
    return [i + 1, *found] if message.get(CACHE_CONTROL) else found


def without_marks(messages: Any) -> Any:
    """The messages as a template may see them."""
    if not isinstance(messages, list) or not any(isinstance(m, dict) and CACHE_CONTROL in m for m in messages):
        return messages
    return [{k: v for k, v in m.items() if k != CACHE_CONTROL} if isinstance(m, dict) else m for m in messages]


def render_marked(
    template: ChatTemplate, messages: list[Message], at: Sequence[Place], **options: Any
) -> tuple[str, list[int]]:
    """The prompt text, and where its marks are, in characters, ascending. at: places. options: as for ChatTemplate.render.

    Raises ChatTemplateError if the whole cannot be rendered."""
    began = time.perf_counter()
    text = template.render(messages, **options)
    if not at or time.perf_counter() - began > SLOW_S:
        return text, []
    options |= {"add_generation_prompt": False, "continue_final_message": False}
    ends = {_end_at(text, template, messages, place, options) for place in at}
    return text, sorted(ends - {0})


def _end_at(text: str, template: ChatTemplate, messages: list[Message], place: Place, options: dict[str, Any]) -> int:
    """How many characters of the text are before a place; 0 if that cannot be told."""
    if isinstance(place, int):
        return _end(text, template, messages[:place], options)
    before, count = place
    parts = [*messages[before]["content"][:count], {"type": "text", "text": _ANYTHING}]
    return _in_common(text, template, [*messages[:before], {**messages[before], "content": parts}], options)


def _end(text: str, template: ChatTemplate, messages: list[Message], options: dict[str, Any]) -> int:
    """How many characters of the text the messages are; 0 if it does not begin with them."""
    try:
        shown = template.render(messages, **options)
    except ChatTemplateError:  # some templates want a user's message: what any one would follow
        return _in_common(text, template, [*messages, _OTHER], options)
    return len(shown) if text.startswith(shown) else 0


def _in_common(text: str, template: ChatTemplate, messages: list[Message], options: dict[str, Any]) -> int:
    try:
        other = template.render(messages, **options)
    except ChatTemplateError:
        return 0
    return bisect.bisect_left(range(1, len(other) + 1), True, key=lambda n: not text.startswith(other[:n]))
