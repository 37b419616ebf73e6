"""A client of an OpenAI-compatible server for `quire chat`, `complete` and `models`. Standard library only.

Each request has a connection of its own: closing it stops the answer. Every failure is a ChatError with a text for the user.
"""

import argparse
import http.client
import json
import os
import ssl
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.ipc.process.command import as_started

KEY_VARIABLE = "OPENAI_API_KEY"
URL = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 600.0  # between two reads of an answer


class ChatError(Exception):
    """A request has failed; the text is for the user."""


class NotReadyError(ChatError):
    """No connection, or a 5xx answer: the server, or one behind a proxy, may be starting."""


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that asks a server."""
    parser.add_argument("--url", default=URL, help="address of the server (default: %(default)s)")
    parser.add_argument("--model", "--model-name", help="one of the server's models (default: its first)")
    parser.add_argument("--api-key", help=f"the server's key (default: {KEY_VARIABLE} of the environment, or none)")


def server_of(args: argparse.Namespace) -> "ChatServer":
    """The server that a command's flags name. Raises ChatError."""
    return ChatServer(args.url, api_key_of(args))


def api_key_of(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get(KEY_VARIABLE) or None


class ChatServer:
    """url: with or without its /v1."""

    def __init__(self, url: str, api_key: str | None = None, headers: Iterable[tuple[str, str]] = ()) -> None:
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
        self._headers |= {name: value.encode() for name, value in headers}

    def models(self) -> list[str]:
        """Names of the server's models."""
        return [str(card["id"]) for card in self.model_cards()]

    def model_cards(self) -> list[dict[str, Any]]:
        with self._request("GET", "/v1/models") as response:
            answer = _json(response.read())
        return [card for card in _objects(answer, "data") if "id" in card]

    def first_model(self) -> str:
        name = next(iter(self.models()), None)
        if name is None:
            raise ChatError("the server offers no model")
        return name

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield a chat's answer in pieces of text. Raises ChatError; closing the iterator stops the answer."""
        for choice in self._choices("/v1/chat/completions", body):
            delta = choice.get("delta")
            if isinstance(delta, dict) and (text := delta.get("content")):
                yield str(text)

    def complete(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield a completion, likewise."""
        for choice in self._choices("/v1/completions", body):
            if text := choice.get("text"):
                yield str(text)

    def _choices(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        data = json.dumps({**body, "stream": True}).encode()
        with self._request("POST", path, data) as response:
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
                yield from _objects(chunk, "choices")
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
            raise NotReadyError(f"nobody answers at {self._url} ({error.strerror or error}); {hint}") from None
        try:
            connection.sock.settimeout(_READ_TIMEOUT_S)
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response.read(), response.status)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"{self._url} broke off: {error}") from None
        except BaseException:  # includes Ctrl-C: raised again, with the connection closed
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


def _refused(data: bytes, status: int) -> ChatError:
    """The error of an answer with a status other than 200; of a proxy's page only the status is used."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    kind = NotReadyError if status >= 500 else ChatError
    return kind(_error_text(answer if isinstance(answer, dict) else {}, status))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise ChatError("the server's answer is not JSON; is this an OpenAI-compatible server?") from None
    return value if isinstance(value, dict) else {}


def _objects(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects in a list of an answer; [] if it is not a list."""
    values = answer.get(name)
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _error_text(answer: dict[str, Any], status: int | None = None) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    text = str(message or answer.get("detail") or f"the server answers with HTTP status {status}")
    return text + " Give the key with --api-key." if status == 401 else text
