"""`quire chat`: a conversation in the terminal with any OpenAI-compatible server. Standard library only."""

import http.client
import io
import json
import os
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import urlsplit

from quire.ipc.process.command import as_started

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 600.0  # between two pieces of an answer
_HELP = """/clear   forget the conversation
/exit    leave; so do /quit and Ctrl-D
/help    this list
//text   send /text
Ctrl-C   stop an answer"""


class ChatError(Exception):
    """Something the user should read."""


@dataclass(frozen=True)
class ChatOptions:
    url: str
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class ChatServer:
    """One OpenAI-compatible server. Each request is a connection of its own: closing it is how an answer is stopped."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ChatError(f"{url}: this is not an URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url}: an URL like http://127.0.0.1:8000 is needed")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._url = url
        self._headers = {"Content-Type": b"application/json"}
        if api_key is not None:
            if not api_key.isprintable():
                raise ChatError("--api-key: a key holds no line breaks or other control characters")
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def models(self) -> list[str]:
        """Names of the models that the server offers."""
        with self._request("GET", "/v1/models") as response:
            answer = _json(response.read())
        return [str(m["id"]) for m in _objects(answer, "data") if "id" in m]

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The pieces of an answer. Raises ChatError; closing the iterator stops the answer."""
        data = json.dumps({**body, "stream": True}).encode()
        with self._request("POST", "/v1/chat/completions", data) as response:
            for line in response:
                event = line.strip()
                if not event.startswith(b"data:"):
                    continue
                event = event[5:].strip()
                if event == b"[DONE]":
                    return
                chunk = _json(event)
                if "error" in chunk:
                    raise ChatError(_error_text(chunk))
                for choice in _objects(chunk, "choices"):
                    delta = choice.get("delta")
                    if isinstance(delta, dict) and (text := delta.get("content")):
                        yield str(text)
        raise ChatError("the answer broke off")

    def _request(self, method: str, path: str, body: bytes | None = None) -> "_Response":
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.connect()
        except OSError as error:
            hint = f"start one with: {as_started('quire serve')}"
            raise ChatError(f"nobody answers at {self._url} ({error.strerror or error}); {hint}") from None
        try:
            connection.sock.settimeout(_READ_TIMEOUT_S)
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_error_text(_json(response.read()), response.status))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"{self._url} broke off: {error}") from None
        except BaseException:  # Ctrl-C while it waits, too: passed on, without a connection left open
            connection.close()
            raise
        return _Response(connection, response)


class _Response:
    """A response as a context that closes its connection."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response

    def __enter__(self) -> http.client.HTTPResponse:
        return self._response

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise ChatError("the server's answer is not JSON; is this an OpenAI-compatible server?") from None
    return value if isinstance(value, dict) else {}


def _objects(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in a list of an answer; none where it holds something else."""
    values = answer.get(name)
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _error_text(answer: dict[str, Any], status: int | None = None) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    text = str(message or answer.get("detail") or f"status {status}")
    return text + " Give the key with --api-key." if status == 401 else text


@dataclass
class Conversation:
    """The messages so far, and what every request has in common."""

    server: ChatServer
    options: ChatOptions
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages[:] = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def ask(self, text: str, out: TextIO) -> bool:
        """One turn, printed as it comes; whether it came to its end. Ctrl-C keeps what has come; an error takes the question
        back and is raised."""
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
        except BrokenPipeError:  # not the server: whoever reads `out` has gone
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
        stdin.reconfigure(errors="replace")  # input that is not text: lone surrogates are no JSON
    try:
        server = ChatServer(options.url, options.api_key)
        model = options.model or next(iter(server.models()), None)
        if model is None:
            raise ChatError("the server offers no model")
        conversation = Conversation(server, options, model)
        if not stdin.isatty():
            question = stdin.read().strip()
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is left in its buffer is not written at exit either
        return 1
    return 0


def _talk(conversation: Conversation, out: TextIO) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    where = f"{conversation.model} at {conversation.options.url}"
    print(f"{where}. /help lists the commands, /exit leaves, Ctrl-C stops an answer.", file=out)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print(file=out)
            return
        except KeyboardInterrupt:
            print(file=out)
            continue
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
            except ChatError as error:  # the next question may do better
                print(f"quire chat: {error}", file=sys.stderr)
