"""Parse multipart/form-data (RFC 7578) with one file, in a complete body: finds where the parts are, without a copy.

It runs in a thread. Large bodies are searched in pieces, because a search blocks Python's other threads. Bounds are the store's
(store/bounds.py). Raises ApiError 400 for a body that is not a form.
"""

import re
from typing import NamedTuple
from urllib.parse import unquote

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.bounds import MAX_FIELD_BYTES, MAX_FILENAME_CHARS, MAX_FORM_PARTS, MAX_PART_HEAD_BYTES

_PIECE = 1 << 20  # bytes searched at once: some 100 us
_BOUNDARY = re.compile(rb"""multipart/form-data\s*;.*?\bboundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))\s*(?:;|$)""", re.I)
_PARAMETER = re.compile(r';\s*(name|filename\*?)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.I)
_PLAIN = ("", "7bit", "8bit", "binary")


class FormFile(NamedTuple):
    """begin, end: the range of its content in the body."""

    name: str
    begin: int
    end: int


class Form(NamedTuple):
    fields: dict[str, str]
    files: dict[str, FormFile]


def boundary_of(content_type: bytes) -> bytes:
    """The boundary that the header content-type names."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise _bad("the header content-type has no boundary")
    return found[1] or found[2]


def parse_form(body: bytearray, boundary: bytes) -> Form:
    """The form's fields and files by name."""
    form, mark = Form({}, {}), b"--" + boundary
    if not body.startswith(mark):
        raise _bad("its body does not begin with the boundary")
    at = len(mark)
    for _ in range(MAX_FORM_PARTS):
        if body[at : at + 2] == b"--":
            return form
        head_begin = body.find(b"\r\n", at, at + 64) + 2  # only white space may stand between
        if head_begin < 2 or body[at : head_begin - 2].strip():
            raise _bad("a boundary is not followed by a new line")
        begin = body.find(b"\r\n\r\n", head_begin - 2, head_begin + MAX_PART_HEAD_BYTES) + 4
        if begin < 4:
            raise _bad("a part's header does not end")
        end = _find(body, b"\r\n" + mark, begin - 2)
        if end < 0:
            raise _bad("its last part does not end")
        _add(form, bytes(body[head_begin : begin - 4]), body, begin, max(begin, end))
        at = end + 2 + len(mark)
    raise _bad(f"it has more than {MAX_FORM_PARTS} parts")


def _add(form: Form, head: bytes, body: bytearray, begin: int, end: int) -> None:
    headers = _headers(head)
    disposition = headers.get("content-disposition", "")
    parameters = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(disposition)}
    if "filename*" in parameters:  # RFC 5987: charset'language'%-escapes
        parameters["filename"] = unquote(parameters["filename*"].rpartition("'")[2])
    if not disposition.lower().startswith("form-data") or "name" not in parameters:
        raise _bad("a part has no content-disposition: form-data with a name")
    if headers.get("content-transfer-encoding", "").lower() not in _PLAIN:
        raise _bad("a part has a content-transfer-encoding")
    name = parameters["name"]
    if name in form.fields or name in form.files:
        raise ApiError(400, f"{name[:64]}: this field is given twice.", param=name[:64], code="invalid_value")
    if "filename" in parameters:
        form.files[name] = FormFile(_file_name(parameters["filename"]), begin, end)
    elif end - begin > MAX_FIELD_BYTES:
        raise ApiError(400, f"{name[:64]}: this field is too long.", param=name[:64], code="invalid_value")
    else:
        form.fields[name] = _text(bytes(body[begin:end]))


def _headers(head: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in _text(head).split("\r\n") if line]
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _file_name(quoted: str) -> str:
    """The name of a file, which is only shown and never used as a path."""
    name = re.sub(r"\\(.)", r"\1", quoted).replace("%22", '"').replace("%0D", "").replace("%0A", "")
    return "".join(char for char in re.split(r"[/\\]", name)[-1] if char.isprintable())[:MAX_FILENAME_CHARS] or "upload"


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _bad("a part's header or field is not UTF-8") from None


def _find(body: bytearray, what: bytes, begin: int) -> int:
    """As body.find, one piece of the body at a time."""
    for at in range(begin, len(body), _PIECE):
        found = body.find(what, at, at + _PIECE + len(what) - 1)
        if found >= 0:
            return found
    return -1


def _bad(what: str) -> ApiError:
    return ApiError(400, f"The request is not valid multipart/form-data: {what}.", code="invalid_form")
