"""Errors of the paths below /v1/messages, in Anthropic's JSON (https://docs.claude.com/en/api/errors), and their request-id.

`speak_anthropic` is called before anything is decided about a request, so the errors for a missing key or a body that is too
large have this form, too. Error texts of shared code name OpenAI's fields; here Anthropic's names replace them.
"""

import re
import secrets

import msgspec

from quire.frontend.http.api.logs.request_log import given_id
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

PATH = b"/v1/messages"
OVERLOADED = 529
THREADS = "thread_unsupported_request"  # the code that tells clients to send whole conversations

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # clients look for this text and shorten the conversation
_WORDS = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\btools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
        (r"\btools\[(\d+)\]\.function\b", r"tools[\1]"),
        (r"\btool_choice\.function\.name\b", "tool_choice.name"),
        (r"\btool_choice 'required' or a function\b", "tool_choice of type 'any' or 'tool'"),
        (r"\btool_choice 'auto'", "tool_choice of type 'auto'"),
        (r"\bthinking_token_budget\b", "thinking.budget_tokens"),
        (r"^(response_format(\.json_schema)?|structured_outputs)\b", "output_config.format"),
        (r"^stop\b", "stop_sequences"),
    )
]


class ErrorDetails(msgspec.Struct, frozen=True):
    error_code: str


class ErrorObject(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: ErrorDetails | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: ErrorObject
    request_id: str


class MessagesError(ApiError):
    """An error in the form that Anthropic's clients expect."""

    event = b"event: error\ndata: %b\n\n"

    def __init__(self, error: ApiError, request_id: str) -> None:
        full = error.status == 503 and error.code == "overloaded"
        super().__init__(
            OVERLOADED if full else error.status,
            _in_these_words(error),
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
            allow=error.allow,
            should_retry=error.should_retry,
        )
        self._request_id = request_id

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def body(self) -> bytes:
        details = ErrorDetails(THREADS) if self.code == THREADS else msgspec.UNSET
        error = ErrorObject(self.type, self.message, details)
        return msgspec.json.encode(MessagesErrorResponse(error=error, request_id=self._request_id))


def _in_these_words(error: ApiError) -> str:
    message = error.message
    for pattern, instead in _WORDS:
        message = pattern.sub(instead, message)
    if error.code == "context_length_exceeded" and not message.startswith(_TOO_LONG):
        return _TOO_LONG + message
    return message


def speak_anthropic(request: Request) -> None:
    """Give the answer to a request for one of these paths a request-id, and its errors Anthropic's form."""
    if request.path != PATH and not request.path.startswith(PATH + b"/"):
        return
    request_id = f"req_{given_id(request.headers).decode() or secrets.token_hex(12)}"
    request.answer_headers += b"request-id: %b\r\n" % request_id.encode()
    request.error_as = lambda error: MessagesError(error, request_id)
