"""A client of an OpenAI-compatible server for `quire chat`, `complete` and `models`. Standard library only.

Each request has a connection of its own: closing it stops the answer. Every failure is a ChatError with a text for the user.
"""

import argparse
import http.client
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from quire.frontend.cli.api_address import Address, ChatError, NotReadyError, StrangerError

KEY_VARIABLE = "OPENAI_API_KEY"
URL = "http://127.0.0.1:8000"
_READ_TIMEOUT_S = 600.0  # between two reads of an answer


class Piece(NamedTuple):
    """A piece of a chat's answer."""

    text: str
    is_reasoning: bool = False


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that asks a server."""
    parser.add_argument("--url", default=URL, help="address of the server: http, https, or unix:PATH (default: %(default)s)")
    parser.add_argument("--model", "--model-name", help="one of the server's models (default: its first)")
    parser.add_argument("--api-key", help=f"the server's key (default: {KEY_VARIABLE} of the environment, or none)")
    parser.add_argument("--cacert", metavar="FILE", help="a certificate, in PEM, to trust for https (default: the system's)")


def server_of(args: argparse.Namespace) -> "ChatServer":
    """The server that a command's flags name. Raises ChatError."""
    return ChatServer(args.url, api_key_of(args), cacert=args.cacert)


def api_key_of(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get(KEY_VARIABLE) or None


class ChatServer:
    """url, cacert: as for Address (api_address.py)."""

    def __init__(
        self, url: str, api_key: str | None = None, headers: Iterable[tuple[str, str]] = (), cacert: str | None = None
    ) -> None:
        self.address = Address(url, cacert)
        self._headers = {"Content-Type": b"application/json"}
        if api_key is not None:
            if not api_key.isprintable():
                raise ChatError("--api-key: a key holds no line breaks or other control characters")
            self._headers["Authorization"] = f"Bearer {api_key}".encode()
        self._headers |= {name: value.encode() for name, value in headers}

    def models(self) -> list[str]:
        """Names of the server's models. Raises ChatError; StrangerError if what answers has no list of models."""
        return [str(card["id"]) for card in self.model_cards()]

    def model_cards(self) -> list[dict[str, Any]]:
        with self._request("GET", "/v1/models") as response:
            answer = _json(response.read())
        return [card for card in _objects(answer, "data") if "id" in card]

    def text(self, path: str) -> str:
        """The answer to GET as text. Raises ChatError."""
        with self._request("GET", path) as response:
            return response.read().decode(errors="replace")

    def first_model(self) -> str:
        name = next(iter(self.models()), None)
        if name is None:
            raise ChatError("the server offers no model")
        return name

    def stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Yield a chat's answer in pieces. Raises ChatError; closing the iterator stops the answer."""
        for choice in self._choices("/v1/chat/completions", body):
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                continue
            if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                yield Piece(str(reasoning), is_reasoning=True)
            if text := delta.get("content"):
                yield Piece(str(text))

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
        connection = self.address.connect()
        try:
            connection.sock.settimeout(_READ_TIMEOUT_S)
            connection.request(method, self.address.prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                page = response.read()
                if self.address.is_for_tls(page):
                    raise ChatError(self.address.wants_https())
                raise _refused(page, response.status, method)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(self.address.why_broken(error)) from None
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


def _refused(data: bytes, status: int, method: str) -> ChatError:
    """The error of an answer with a status other than 200; of a proxy's page only the status is used."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if method == "GET" and status in (404, 405) and not (isinstance(answer, dict) and "error" in answer):
        return StrangerError(f"what answers has no list of models (HTTP status {status}); is this an OpenAI-compatible server?")
    kind = NotReadyError if status >= 500 else ChatError
    return kind(_error_text(answer if isinstance(answer, dict) else {}, status))


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise StrangerError("the server's answer is not JSON; is this an OpenAI-compatible server?") from None
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
