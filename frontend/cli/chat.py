"""`quire chat`: a conversation in the terminal with any OpenAI-compatible server. Standard library only."""

import argparse
import http.client
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from quire.frontend.cli.api_client import ChatError, ChatServer, api_key_of

_HELP = """/clear   forget the conversation
/exit    leave; so do /quit and Ctrl-D
/help    this list
//text   send /text
Ctrl-C   stop an answer"""


@dataclass(frozen=True)
class ChatOptions:
    url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    question: str | None = None  # ask only this; None: a conversation, or the piped input


def options_of(args: argparse.Namespace) -> ChatOptions:
    return ChatOptions(
        url=args.url,
        model=args.model,
        api_key=api_key_of(args),
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        question=args.quick,
    )


@dataclass
class Conversation:
    """The messages so far, and the options of every request."""

    server: ChatServer
    options: ChatOptions
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages[:] = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def ask(self, text: str, out: TextIO) -> bool:
        """Run one turn and print the answer as it arrives; returns whether it is complete. Ctrl-C keeps the text so far. An
        error before any text removes the question and is raised."""
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"model": self.model, "messages": self.messages}
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        pieces: list[str] = []
        complete = True
        try:
            for piece in self.server.stream(body):
                pieces.append(piece)
                out.write(piece)
                out.flush()
        except KeyboardInterrupt:
            complete = False
            out.write(" [stopped]")
        except BrokenPipeError:  # the reader of `out` has gone; not the server's failure
            raise
        except (ChatError, OSError, http.client.HTTPException) as error:
            if not pieces:
                self.messages.pop()
            out.write("\n" if pieces else "")
            raise ChatError(str(error)) from None
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
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
        server = ChatServer(options.url, options.api_key)
        model = options.model or server.first_model()
        conversation = Conversation(server, options, model)
        if options.question is not None or not stdin.isatty():
            question = options.question if options.question is not None else stdin.read().strip()
            if not question:
                raise ChatError("nothing was piped in")
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


def typed_lines(out: TextIO) -> Iterator[str]:
    """Yield typed lines until the end of the input. Ctrl-C drops the current line."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=out)
            return
        except KeyboardInterrupt:
            print(file=out)


def _talk(conversation: Conversation, out: TextIO) -> None:
    where = f"{conversation.model} at {conversation.options.url}"
    print(f"{where}. /help lists the commands, /exit leaves, Ctrl-C stops an answer.", file=out)
    for text in map(str.strip, typed_lines(out)):
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
        elif text == "/help":
            print(_HELP, file=out)
        elif text.startswith("/") and not text.startswith("//"):
            print(f"{text.split()[0]} is no command: /help lists them, and // begins a message with a slash", file=out)
        elif text:
            try:
                conversation.ask(text[1:] if text.startswith("//") else text, out)
            except ChatError as error:  # the conversation goes on
                print(f"quire chat: {error}", file=sys.stderr)
