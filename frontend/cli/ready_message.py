"""ReadyMessage: what `quire serve` tells the user once requests can be sent, with a first one to paste."""

import json
import logging
import os
import shlex
import socket
from collections.abc import Sequence
from typing import Any

from quire.frontend.http.server import FrontendConfig
from quire.ipc.process.command import as_started

log = logging.getLogger("quire.serve")

# what a user can send first, by what the model can do
_TRY: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "embed": ("/v1/embeddings", {"input": ["A quire is a set of pages."]}),
    "classify": ("/classify", {"input": ["A quire is a set of pages."]}),
    "token_embed": ("/score", {"text_1": "What is a quire?", "text_2": ["A set of pages.", "A choir sings."]}),
    "token_classify": ("/pooling", {"input": ["A quire is a set of pages."]}),
}


class ReadyMessage:
    """With JSON logs it is a log line, as collectors read stdout, too."""

    def __init__(
        self, host: str, port: int, needs_key: bool, scheme: str = "http", uds: str | None = None, log_format: str = "text"
    ) -> None:
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._url = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
        self._curl = self._url
        if uds is not None:
            self._url = f"unix:{os.path.abspath(uds)}"
            self._curl = f"--unix-socket {shlex.quote(os.path.abspath(uds))} {scheme}://localhost"
        self._needs_key = needs_key
        self._note = ""
        self._is_logged = log_format == "json"

    @classmethod
    def of(cls, config: FrontendConfig, sock: socket.socket, host: str, uds: str | None) -> "ReadyMessage":
        port = sock.getsockname()[1] if uds is None else 0
        scheme = "http" if config.tls is None else "https"
        message = cls(host, port, bool(config.api_keys), scheme, uds, config.log_format)
        if not config.admin_api_keys and not config.key_limits.have_admin:
            routes, who = "/metrics, /server_info, /reset_prefix_cache, profiles", message.everyone
            message._note = f"routes for the operator ({routes}) answer to {who}; --admin-api-key gives them a key of their own"
        return message

    @property
    def everyone(self) -> str:
        return "any API key" if self._needs_key else "every client"

    def __call__(self, model: str, tasks: Sequence[str] = ("generate",)) -> None:
        """tasks: what the model can do."""
        if self._note:
            log.info("%s", self._note)
        if self._is_logged:
            return log.info("Quire serves %s at %s", model, self._url)
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._needs_key else ""
        path, fields = next(_TRY[task] for task in _TRY if task in tasks)
        body = shlex.quote(json.dumps({"model": model, **fields}))
        print(f"Quire serves {model} at {self._url}")
        print(f"Try: curl {self._curl}{path}{key} -H 'Content-Type: application/json' -d {body}", flush=True)
        key = " --api-key YOUR_KEY" if self._needs_key else ""
        if not self._url.startswith("unix:") and "generate" in tasks:
            print(f"or:  {as_started('quire chat')} --url {self._url}{key}", flush=True)
        return None
