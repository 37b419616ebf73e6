"""BodyDecoder: a request's body as a struct of schemas.py, or the 400 that names the field.

A field that is null means the same as one that is absent. Fields that OpenAI's clients send and that change nothing here (user,
metadata, store, service_tier, ...) are ignored, and so are unknown ones, which are logged (unknown_fields.py). Numbers and
booleans are accepted as pydantic, and so vLLM, accepts them: 5.0 and "5" for 5, "true" for true. A body of exact types without
unknown fields is parsed once. Any other body is parsed again leniently, and a third time to find the unknown names, which
msgspec does not report.
"""

import gc
import re
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from quire.frontend.client.turns import in_thread
from quire.frontend.http.api.bodies.body_shape import WEIGHED_BYTES
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

# Fields of OpenAI's and vLLM's APIs that have no effect on the answer.
IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
     "safety_identifier", "verbosity", "session_id", "return_token_offsets", "return_mm_kwargs",
     "prompt_cache_options", "return_assistant_tokens_mask", "mm_payload")
)  # fmt: skip

T = TypeVar("T", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_LONGEST_TEXT = 1000
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`$")


class BodyDecoder(Generic[T]):
    """Decodes bodies of one struct type."""

    def __init__(self, kind: type[T]) -> None:
        self._ignored = IGNORED.difference(kind.__struct_fields__)
        assert len(self._ignored) > 1  # attrgetter of a single name returns no tuple
        self._ignored_values = attrgetter(*self._ignored)
        ignored = [(name, msgspec.Raw, None) for name in sorted(self._ignored)]
        options = {"kw_only": True, "forbid_unknown_fields": True}
        strict = msgspec.defstruct(kind.__name__, ignored, bases=(kind,), **options)  # type: ignore[arg-type]
        self._strict: msgspec.json.Decoder[T] = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(kind, strict=False)
        self._known = IGNORED.union(kind.__struct_fields__)

    def decode(self, body: bytearray, unknown: UnknownFields) -> T:
        """The body as a struct; `unknown` logs fields that the struct lacks. Raises ApiError 400, naming the field."""
        collects = gc.isenabled()
        gc.disable()  # it would scan half-parsed lists of lists again and again, for seconds, and find no garbage
        try:
            return self._decode(body, unknown)
        except msgspec.ValidationError as error:
            raise _wrong_type(_shortened(str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The request's body is not valid JSON{_flaw(error, body)}.", code="invalid_json") from None
        except RecursionError:
            raise ApiError(400, "The request's JSON is nested too deeply.", code="invalid_json") from None
        finally:
            if collects:
                gc.enable()

    def _decode(self, body: bytearray, unknown: UnknownFields) -> T:
        try:
            decoded = self._strict.decode(body)
        except msgspec.ValidationError:
            decoded = self._lenient.decode(body)
            unknown.look_at(body, self._known)
            return decoded
        if any(self._ignored_values(decoded)):
            for name in self._ignored:  # a Raw is a view of the body, and would keep that in memory until the answer ends
                setattr(decoded, name, None)
        return decoded


async def read_body(decoder: BodyDecoder[T], request: Request, unknown: UnknownFields) -> T:
    """Decode a request's body (BodyDecoder.decode): at once if it is small, in a thread if it is large."""
    body = request.take_body()
    if len(body) < WEIGHED_BYTES:
        return decoder.decode(body, unknown)
    return await in_thread(decoder.decode, body, unknown)


def _shortened(text: str) -> str:
    """msgspec's message, cut: it quotes the whole value where only certain ones are allowed."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT // 2]}...{text[-_LONGEST_TEXT // 2 :]}"


def _flaw(error: Exception, body: bytearray) -> str:
    """The JSON error and its position, if msgspec reports them. Its text quotes nothing of the body."""
    if isinstance(error, UnicodeDecodeError):
        return ": it is not UTF-8"
    what, _, where = str(error).partition("malformed: ")
    if not where and "truncated" in what and not body.rstrip().endswith(b"}"):
        return ": it ends too early"
    return f": {where}" if where else ""


def _wrong_type(text: str) -> ApiError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    if missing := _MISSING.match(what):
        name = f"{path}.{missing['name']}".lstrip(".")
        return ApiError(400, f"{name}: this field is required.", param=name, code="missing_required_parameter")
    what = what[:1].lower() + what[1:]
    message = f"{path}: {what}." if path else f"The request's body: {what}."
    return ApiError(400, message, param=path or None, code="invalid_type")
