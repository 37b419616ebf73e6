"""Errors of the paths below /api, in Ollama's JSON: {"error": text}.

app.py uses this form before anything is decided about a request, so the error for a missing key has it, too. Error texts of
shared code name OpenAI's fields; here Ollama's names replace them.
"""

import re

import msgspec

from quire.frontend.http.api.ollama.schemas import Options
from quire.frontend.http.protocol.errors import ApiError

_WORDS = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\bresponse_format(\.json_schema(\.schema)?)?", "format"),
        (r"\brepetition_penalty\b", "options.repeat_penalty"),
        (r"^max_tokens\b", "options.num_predict"),
        (rf"^({'|'.join(Options.__struct_fields__)})\b", r"options.\1"),
    )
]


def is_ollamas(path: bytes) -> bool:
    """Whether a path is of Ollama's API: those that begin with /api/v1 are meant for OpenAI's."""
    return path.startswith(b"/api/") and not path.startswith(b"/api/v1/")


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    error: str


class OllamaError(ApiError):
    """An error in the form that Ollama's clients expect."""

    event = b"%b\n"

    def __init__(self, error: ApiError) -> None:
        message = error.message
        for pattern, instead in _WORDS:
            message = pattern.sub(instead, message)
        super().__init__(
            error.status,
            message,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
            allow=error.allow,
            should_retry=error.should_retry,
        )

    def body(self) -> bytes:
        return msgspec.json.encode(OllamaErrorResponse(self.message))
