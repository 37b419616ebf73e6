"""Ids of requests, and --enable-log-requests: a log line when a request begins and one when it ends.

A client may choose an id with the header X-Request-Id: it is sent back, and the answer's id contains it. Apart from that id,
lines have lengths and numbers only, and no text of the client.
"""

import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence

from quire.frontend.client.client import Client
from quire.frontend.http.api.prompt_run import PromptRun
from quire.ipc.limits import output_limit, output_room
from quire.ipc.sampling import loggable

logger = logging.getLogger("quire.http")

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def given_id(headers: Mapping[bytes, bytes]) -> bytes:
    """The request's X-Request-Id; b"" if it has none, or one that is too long or has characters that ids may not have."""
    given = headers.get(b"x-request-id")
    return given if given is not None and _GIVEN_ID.fullmatch(given) else b""


def name_request(headers: dict[bytes, bytes]) -> None:
    """Add an X-Request-Id to a request that has no usable one, as if its client had sent it."""
    if not given_id(headers):
        headers[b"x-request-id"] = secrets.token_hex(16).encode()


def new_id(prefix: str, headers: Mapping[bytes, bytes], of_body: str | None = None) -> str:
    """The id of an answer. of_body: the body's request_id; the header takes precedence, as in vLLM."""
    return f"{prefix}-{given_id(headers).decode() or of_body or secrets.token_hex(16)}"


class RequestLog:
    """One line for each HTTP request, with any number of prompts, when it was submitted to the engine, and one when it ends."""

    def __init__(self, enabled: bool, client: Client) -> None:
        self._enabled = enabled
        self._client = client

    def started(self, name: str, runs: Sequence[PromptRun], streamed: bool) -> None:
        if not self._enabled:
            return
        longest = self._client.welcome.limits.max_model_len
        most = max(
            output_limit(run.stream.params.max_tokens, output_room(run.stream.num_prompt_tokens, longest)) for run in runs
        )
        words = [f"{n}={value}" for n, value in loggable(runs[0].stream.params).items() if n != "max_tokens"]
        words = [_prompts(runs), f"max_tokens={most}", *words, *(["streamed"] if streamed else [])]
        logger.info("request %s: %s", name, ", ".join(words))

    def ended(self, name: str, runs: Sequence[PromptRun]) -> None:
        if not self._enabled or not runs:
            return
        reasons = dict.fromkeys(reason for run in runs for reason in _reasons(run))
        num_tokens = sum(sum(run.num_tokens) for run in runs)
        seconds = time.time() - runs[0].stream.metrics.arrival_time
        logger.info(
            "request %s: %s, %s, %d output tokens, %.3f s", name, "+".join(reasons), _prompts(runs), num_tokens, seconds
        )


def _prompts(runs: Sequence[PromptRun]) -> str:
    total = sum(run.stream.num_prompt_tokens for run in runs)
    return f"{total} prompt tokens" if len(runs) == 1 else f"{total} tokens in {len(runs)} prompts"


def _reasons(run: PromptRun) -> list[str]:
    if run.stream.error is not None:
        return ["error"]
    return [reason or "abort" for reason in run.finish_reasons]
