"""`quire chat`: a conversation in the terminal with any OpenAI-compatible server, or with one of its own (chat_server.py)."""

import argparse
import contextlib
import http.client
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from quire.frontend.cli.api_address import ChatError, NoServerError, StrangerError
from quire.frontend.cli.api_client import ChatServer, Piece, api_key_of
from quire.frontend.cli.chat_images import image_part
from quire.frontend.cli.chat_server import OwnServer
from quire.ipc.process.command import as_started

_HELP = """/clear        forget the conversation
/system TEXT  set the system message; without TEXT, remove it
/image FILE   send an image with the next message; without FILE, drop those that wait
/model NAME   go on with another of the server's models; without NAME, list them
/exit         leave; so do /quit and Ctrl-D
/help         this list
//text        send /text
\"\"\"           begins several lines, and ends them; a \\ at a line's end adds one more line
Ctrl-C        stop an answer; at the prompt drop the line, and twice leave"""
_QUOTES = '"""'
_LOOK_S = 0.2
_DIM, _PLAIN = "\033[2m", "\033[0m"


@dataclass(frozen=True)
class ChatOptions:
    url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    question: str | None = None  # ask only this; None: a conversation, or the piped input
    cacert: str | None = None
    own_model: str | None = None  # folder or hub id for a server of the chat's own, if none answers at url
    serve_flags: tuple[str, ...] = ()  # of that server


def options_of(args: argparse.Namespace) -> ChatOptions:
    return ChatOptions(
        url=args.url,
        model=args.model,
        api_key=api_key_of(args),
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        question=args.quick,
        cacert=args.cacert,
        own_model=args.own_model,
        serve_flags=tuple(args.serve_flags),
    )


class _Screen:
    """Writes pieces of an answer: reasoning dimmed in a terminal, and not at all elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._is_terminal = out, out.isatty()
        self._reasons = False

    def show(self, piece: Piece) -> None:
        if piece.is_reasoning and not self._is_terminal:
            return
        if piece.is_reasoning and not self._reasons:
            self._reasons = True
            self._out.write(_DIM)
        elif not piece.is_reasoning:
            self.end_reasoning()
        self._out.write(piece.text)
        self._out.flush()

    def end_reasoning(self) -> None:
        if self._reasons:
            self._out.write(f"{_PLAIN}\n\n")
            self._reasons = False


@dataclass
class Conversation:
    """The messages so far, and the options of every request."""

    server: ChatServer
    options: ChatOptions
    model: str
    own: OwnServer | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    system: str | None = None
    images: list[dict[str, Any]] = field(default_factory=list)  # of the next message

    def __post_init__(self) -> None:
        self.set_system(self.options.system)

    def clear(self) -> None:
        self.messages.clear()
        self.images.clear()
        self.set_system(self.system)

    def set_system(self, text: str | None) -> None:
        """Set the system message, or remove it, of the whole conversation."""
        self.system = text or None
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages[:] = [{"role": "system", "content": self.system}, *rest] if self.system else rest

    def ask(self, text: str, out: TextIO) -> bool:
        """Run one turn and print the answer as it arrives; returns whether it is complete. Ctrl-C keeps the text so far. An
        error before any text removes the question and is raised."""
        content: str | list[Any] = [*self.images, {"type": "text", "text": text}] if self.images else text
        self.images.clear()
        self.messages.append({"role": "user", "content": content})
        body: dict[str, Any] = {"model": self.model, "messages": self.messages}
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        pieces: list[str] = []
        screen = _Screen(out)
        complete = True
        try:
            for piece in self.server.stream(body):
                screen.show(piece)
                if not piece.is_reasoning:
                    pieces.append(piece.text)
        except KeyboardInterrupt:
            complete = False
            screen.end_reasoning()
            out.write(" [stopped]")
        except BrokenPipeError:  # the reader of `out` has gone; not the server's failure
            raise
        except (ChatError, OSError, http.client.HTTPException) as error:
            screen.end_reasoning()
            if not pieces:
                self.messages.pop()
            out.write("\n" if pieces else "")
            raise ChatError((self.own.why_gone() if self.own is not None else None) or str(error)) from None
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
        screen.end_reasoning()
        if not pieces:
            self.messages.pop()
        out.write("\n")
        out.flush()
        return complete


def chat(options: ChatOptions, stdin: TextIO | None = None, out: TextIO | None = None) -> int:
    """Talk until /exit or the end of input; returns the exit code. Piped input is one question."""
    stdin, out = stdin or sys.stdin, out or sys.stdout
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(errors="replace")  # input that is not UTF-8: JSON cannot have lone surrogates
    try:
        question = options.question
        if question is None and not stdin.isatty():
            question = stdin.read().strip()
            if not question:
                raise ChatError("nothing was piped in")
        with contextlib.ExitStack() as at_end:
            conversation = _begin(options, at_end)
            if question is not None:
                return 0 if conversation.ask(question, out) else 130
            _talk(conversation, out)
    except ChatError as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # so that the exit does not flush its buffer to the pipe
        return 1
    return 0


def _begin(options: ChatOptions, at_end: contextlib.ExitStack) -> Conversation:
    """A conversation with the server that answers, or else with one of the chat's own, which at_end ends. Raises ChatError."""
    server = ChatServer(options.url, options.api_key, cacert=options.cacert)
    if options.own_model is None:
        try:
            return Conversation(server, options, options.model or server.first_model())
        except NoServerError as error:
            hint = f", or name a model for a server of the chat's own: {as_started('quire chat MODEL')}"
            raise ChatError(f"{error}{hint if server.address.is_local else ''}") from None
    try:
        cards = server.model_cards()
    except (NoServerError, StrangerError) as error:
        if not server.address.is_local:
            raise
        if isinstance(error, StrangerError):
            print(f"quire chat: at {options.url} answers something else than a server of models", file=sys.stderr)
    else:
        return Conversation(server, options, _model_of(options, cards))
    own = at_end.enter_context(OwnServer(options.own_model, options.serve_flags))
    own.wait_until_ready()
    own_server = ChatServer(own.url)
    return Conversation(own_server, options, options.model or own_server.first_model(), own)


def _model_of(options: ChatOptions, cards: list[dict[str, Any]]) -> str:
    """The name under which a server has the model that was asked for. If it does not have it, its first, and a line says so."""
    wanted = options.own_model or ""
    names = [str(card["id"]) for card in cards]
    if options.serve_flags:
        flags = " ".join(options.serve_flags)
        print(f"quire chat: a server answers at {options.url} already: {flags} has no effect", file=sys.stderr)
    if options.model is not None:
        return options.model
    for card, name in zip(cards, names, strict=True):
        if wanted in (name, card.get("root")) or os.path.basename(wanted.rstrip("/")) == name:
            return name
    if not names:
        raise ChatError(f"the server at {options.url} offers no model")
    print(
        f"quire chat: the server at {options.url} has {', '.join(names)}, and not {wanted}: this chat is with {names[0]}. "
        "With --url and a port where none answers, a server is started",
        file=sys.stderr,
    )
    return names[0]


def typed_lines(out: TextIO, prompt: Callable[[], str] = lambda: "> ") -> Iterator[str | None]:
    """Yield typed lines until the end of the input, or two Ctrl-C in a row. One drops the current line, and yields None."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    line: str | None = ""
    while True:
        was_stopped = line is None
        try:
            with _looking_for_signals():
                line = input(prompt())
        except EOFError:
            print(file=out)
            return
        except KeyboardInterrupt:
            print(file=out)
            if was_stopped:
                return
            print("Ctrl-C once more, or Ctrl-D, leaves.", file=out)
            line = None
        yield line


@contextlib.contextmanager
def _looking_for_signals() -> Iterator[None]:
    """Interrupt input() now and then. It looks for a Ctrl-C only when a signal interrupts its wait for a key, so one that comes
    between the prompt and that wait would have no effect until the next key."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:  # a Ctrl-C in here leaves a handler that does nothing
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _messages(out: TextIO) -> Iterator[str]:
    """Typed messages: lines, or several that stand between three quotes or are joined by a backslash."""
    unended: list[str] = []
    quoted = False
    lines = typed_lines(out, lambda: "... " if unended else "> ")
    for line in lines:
        if line is None:  # Ctrl-C
            unended.clear()
            quoted = False
        elif quoted:
            text, end, _ = line.partition(_QUOTES)
            unended.append(text)
            if end:
                yield _no_command("\n".join(unended).strip("\n"))
                unended.clear()
                quoted = False
        elif not unended and line.lstrip().startswith(_QUOTES):
            text, end, _ = line.lstrip().removeprefix(_QUOTES).partition(_QUOTES)
            if end:
                yield _no_command(text)
            else:
                unended.append(text)
                quoted = True
        elif line.endswith("\\"):
            unended.append(line[:-1])
        else:
            yield "\n".join([*unended, line]).strip()
            unended.clear()


def _no_command(text: str) -> str:
    return f"/{text}" if text.startswith("/") else text


def _talk(conversation: Conversation, out: TextIO) -> None:
    where = "a server of this chat's own" if conversation.own is not None else conversation.options.url
    print(f"{conversation.model} at {where}. /help lists the commands, /exit leaves, Ctrl-C stops an answer.", file=out)
    for text in _messages(out):
        if text in ("/exit", "/quit", "/bye"):
            return
        try:
            if text.startswith("/") and not text.startswith("//"):
                _command(conversation, text, out)
            elif text.strip():
                conversation.ask(text[1:] if text.startswith("//") else text, out)
        except ChatError as error:  # the conversation goes on
            print(f"quire chat: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # of a command, or when an answer has just ended
            print(file=out)


def _command(conversation: Conversation, text: str, out: TextIO) -> None:
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    match name:
        case "/clear" if not rest:
            conversation.clear()
        case "/help" | "/?" if not rest:
            print(_HELP, file=out)
        case "/system":
            conversation.set_system(rest)
            print("the system message is set" if rest else "there is no system message now", file=out)
        case "/image":
            if rest:
                conversation.images.append(image_part(rest))
            else:
                conversation.images.clear()
            print(f"images with the next message: {len(conversation.images)}", file=out)
        case "/model":
            names = conversation.server.models()
            if rest in names:
                conversation.model = rest
                print(f"this chat goes on with {rest}", file=out)
            else:
                missing = f"the server has no model {rest!r}; " if rest else ""
                print(f"{missing}this chat is with {conversation.model}; there are {', '.join(names)}", file=out)
        case _:
            print(f"{name} is no command: /help lists them, and // begins a message with a slash", file=out)
