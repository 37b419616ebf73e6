"""Lines of batch files, in OpenAI's format: a line of the input is a request, a line of the output its answer.

Shared by /v1/batches (runner.py) and `quire run-batch` (cli/run_batch.py). This file only converts bytes in memory. Bodies are
not decoded here: the route that answers them does, as if they had come over HTTP.
"""

import re
import secrets
from typing import Any, NamedTuple

import msgspec

from quire.frontend.http.store.bounds import MAX_CUSTOM_ID_CHARS

# Routes that a line may name; each answers a POST of JSON with JSON.
ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate", "/v1/embeddings", "/v2/embed",
    "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip

MAX_LINE_BYTES = 64 << 20  # as for a body over HTTP, where the model takes images
MAX_TEXT_LINE_BYTES = 8 << 20  # where it does not
_PATH = re.compile(r" - at `\$\.?(?P<path>.*)`$")


class BadLine(Exception):
    """An error in a line of the input. code, param: as OpenAI's. custom_id: if it could be read."""

    def __init__(self, code: str, message: str, param: str | None = None, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.custom_id = custom_id


class Line(NamedTuple):
    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CustomId(msgspec.Struct):
    custom_id: Any = None


class _Flags(msgspec.Struct):
    """Fields of a body that ask for answers which a batch cannot give."""

    stream: Any = None
    background: Any = None


_line_decoder = msgspec.json.Decoder(_Line)
_custom_id_decoder = msgspec.json.Decoder(_CustomId)
_flags_decoder = msgspec.json.Decoder(_Flags)


def parse_line(data: bytes) -> Line:
    """One line of an input file, which is not blank. Raises BadLine."""
    if len(data) > MAX_LINE_BYTES:
        raise BadLine("line_too_long", f"a line may be at most {MAX_LINE_BYTES} bytes long")
    try:
        line = _line_decoder.decode(data)
        body = bytes(line.body)
        flags = _flags_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong(data, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadLine("invalid_json_line", "this line is not valid JSON") from None
    custom_id = line.custom_id
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadLine("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id")
    if line.method.upper() != "POST":
        raise BadLine("invalid_method", "method must be POST", "method", custom_id)
    if line.url not in ENDPOINTS:
        raise BadLine("invalid_url", f"url must be {' or '.join(ENDPOINTS)}", "url", custom_id)
    if flags.stream:
        raise BadLine("invalid_value", "stream is not possible in a batch", "body.stream", custom_id)
    if flags.background:
        raise BadLine("invalid_value", "background is not possible in a batch", "body.background", custom_id)
    return Line(custom_id, line.url, body)


def _wrong(data: bytes, text: str) -> BadLine:
    """The decoder's error in words for the user, with the custom_id if there is one."""
    custom_id = None
    try:
        custom_id = _custom_id_decoder.decode(data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # what the first decoder did not read may be broken, too
        return BadLine("invalid_json_line", "a line must be a JSON object, with a custom_id that is a text")
    custom_id = custom_id if isinstance(custom_id, str) and len(custom_id) <= MAX_CUSTOM_ID_CHARS else None
    path = _PATH.search(text)
    what = _PATH.sub("", text)
    what = what[:1].lower() + what[1:]
    if missing := re.search(r"missing required field `(\w+)`", what):
        return BadLine("missing_required_parameter", f"{missing[1]} is required", missing[1], custom_id)
    param = path["path"] if path else "body"
    return BadLine("invalid_type", f"{param}: {what}", param, custom_id)


# ---------------------------------------------------------------------------------------------------------------- answers
class Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    line: int | None = None


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or error file."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None


def new_request_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


def answer_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """A line without its newline. Newlines in the body would break the file; our JSON has none."""
    response = Response(status, request_id, msgspec.Raw(body.replace(b"\n", b"")))
    return msgspec.json.encode(AnswerLine(id=request_id, custom_id=custom_id, response=response, error=None))


def error_line(custom_id: str | None, code: str, message: str, line: int | None = None) -> bytes:
    """The answer to a request that was not made. line: its number in the input, from 1."""
    error = LineError(code, message, line)
    return msgspec.json.encode(AnswerLine(id=new_request_id(), custom_id=custom_id, response=None, error=error))
