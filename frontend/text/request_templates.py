"""Render chat templates in separate processes, for they may take long, use much memory, or crash it: requests' and models'.

jinja's sandbox restricts what a template can access, and bounds nothing: not loops, not `**`, not a comparison of lists that
contain the same list twice, and so on down (945 bytes of template take 4 s in C, in which no other thread runs). A trace
function that looks at the clock can end Python code only, and jinja may catch its exception. So a child process with little
memory renders, and is killed when it takes too long. That costs a short request 0.1 ms, and 0.2 s for the first one and for one
after a kill. Templates that requests bring are rendered one after the other, those of different API keys in turn. The model
has its own template rendered within the same limits, in another process.

`render_apart` and `render_own` are the server's side, `main` the child's.
"""

import asyncio
import atexit
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from quire.frontend.text.chat_template import ChatTemplate, ChatTemplateError
from quire.frontend.text.prompt_marks import Place, render_marked
from quire.ipc.process.asked_child import AskedChild
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.fair_executor import FairExecutor
from quire.ipc.process.framing import data_bytes, limit_this_process, receive, send

MODULE = "quire.frontend.text.request_templates"
TIMEOUT_S = 2.0  # CPU time to read a template, compile it and render a conversation; others wait for it
MAX_BYTES = 512 << 20
MAX_KEPT_BYTES = MAX_BYTES // 4  # a child that keeps more, in compiled templates, is replaced before the next one
_READY = b"ready"


class ToRender(msgspec.Struct, frozen=True):
    """The arguments of ChatTemplate and its `render`; marks: places (prompt_marks.py). placeholders: as for ChatTemplate."""

    source: str
    special_tokens: dict[str, str]
    content_format: str | None
    messages: list[Any]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    marks: list[Place] = []
    placeholders: dict[str, str] = {}


class Rendered(msgspec.Struct, frozen=True):
    """marks: where they are, in characters. error: why there is no text, for the user. is_last: the child uses too much memory
    to render more."""

    text: str
    marks: list[int] = []
    error: str = ""
    is_last: bool = False


class TemplateProcessConfig(msgspec.Struct, frozen=True):
    socket_fd: int
    max_kept_bytes: int


_encode = msgspec.json.Encoder().encode
_decode_wanted = msgspec.json.Decoder(ToRender).decode
_decode_rendered = msgspec.json.Decoder(Rendered).decode


class TemplateProcess:
    """One child, started for the first template, and again after a template that ended it. Not for concurrent threads."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._child = AskedChild(MODULE)

    def render(self, wanted: ToRender, timeout_s: float) -> Rendered:
        """The prompt. Raises ChatTemplateError; OSError if no process can be started, or two were lost."""
        try:
            request = _encode(wanted)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError("a chat template and its conversation must be plain JSON data") from error
        if not self._child.is_there and self._child.start(self._config) != _READY:
            raise OSError("the process that renders chat templates did not start")
        answer = self._child.ask(request, timeout_s)
        if answer is None:
            raise ChatTemplateError(f"the chat template took more than {timeout_s:g} s")
        if not answer:
            raise ChatTemplateError("the chat template needs more memory, or is nested deeper, than is allowed")
        rendered = _decode_rendered(answer)
        if rendered.is_last:
            self.close()
        if rendered.error:
            raise ChatTemplateError(rendered.error)
        return rendered

    def _config(self, socket_fd: int) -> msgspec.Struct:
        return TemplateProcessConfig(socket_fd, self._max_kept_bytes)

    def close(self) -> None:
        """End the child now. The next `render` starts another."""
        self._child.close()


_process, _own_process = TemplateProcess(), TemplateProcess()
_thread = ThreadPoolExecutor(1, "quire-templates")  # waits for the process, without the interpreter's lock
_own_thread = ThreadPoolExecutor(1, "quire-template")
_turns, _own_turns = FairExecutor(_thread, 1), FairExecutor(_own_thread, 1)
atexit.register(_process.close)  # the threads have ended by then
atexit.register(_own_process.close)


async def render_apart(wanted: ToRender, owner: str = "") -> Rendered:
    """The prompt, when it is the turn of the owner of the request's key. Raises ChatTemplateError."""
    work = _turns.submit(lambda: _process.render(wanted, TIMEOUT_S), owner, len(wanted.source))
    return await asyncio.wrap_future(work)


Render = Callable[[ToRender, str], Awaitable[Rendered]]  # and the owner of the request's key


async def render_own(wanted: ToRender, owner: str = "") -> Rendered:
    """The same for the model's own template, in a process that no request's template delays."""
    work = _own_turns.submit(lambda: _own_process.render(wanted, TIMEOUT_S), owner, len(wanted.source))
    return await asyncio.wrap_future(work)


# ------------------------------------------------------------------------------------------------- in the child
def main() -> None:
    config = child_main_config(TemplateProcessConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    limit_this_process(MAX_BYTES)
    most = data_bytes() + config.max_kept_bytes
    send(sock, _READY)
    while request := receive(sock):
        send(sock, _answer(_decode_wanted(request), most))


def _answer(wanted: ToRender, most_bytes: int) -> bytes:
    try:
        return _encode(msgspec.structs.replace(render_here(wanted), is_last=data_bytes() > most_bytes))
    except ChatTemplateError as error:
        text = str(error)
    except UnicodeEncodeError:
        text = "the chat template makes a text with half of a surrogate pair"
    except MemoryError:
        text = "the chat template needs more memory than is allowed"
    return _encode(Rendered("", [], text.encode(errors="replace").decode(), data_bytes() > most_bytes))


def render_here(wanted: ToRender) -> Rendered:
    """The prompt, without any limits. Raises ChatTemplateError."""
    text, marks = render_marked(
        ChatTemplate(wanted.source, wanted.special_tokens, wanted.content_format, wanted.placeholders),
        wanted.messages,
        wanted.marks,
        tools=wanted.tools,
        documents=wanted.documents,
        add_generation_prompt=wanted.add_generation_prompt,
        continue_final_message=wanted.continue_final_message,
        variables=wanted.variables,
    )
    return Rendered(text, marks)


if __name__ == "__main__":
    main()
