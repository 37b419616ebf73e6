"""Bodies: one scan, whatever of them is known; what is unknown is named; nothing of the bytes is kept."""

import logging

import pytest

from quire.frontend.http.api.bodies.body import IGNORED, BodyDecoder
from quire.frontend.http.api.bodies.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.protocol.errors import ApiError

BODY = b'{"prompt": "a", "n": 2, "stream_options": {"include_usage": true, "new_here": 1}'
HARMLESS = b", ".join(b'"%b": {"a": ["b"]}' % name.encode() for name in sorted(IGNORED))


class NeverAsked:
    """A decoder for which there is nothing to do."""

    def decode(self, body: bytearray) -> None:
        raise AssertionError("the body is scanned again")


@pytest.mark.parametrize("rest", [b"}", b", " + HARMLESS + b"}"], ids=["known", "ignored"])
def test_a_body_of_known_fields_is_scanned_once(rest):
    decoder, body = BodyDecoder(CompletionRequest), bytearray(BODY + rest)
    decoder._lenient = NeverAsked()
    decoded = decoder.decode(body, UnknownFields())
    assert isinstance(decoded, CompletionRequest) and (decoded.prompt, decoded.n) == ("a", 2)
    assert decoded.stream_options.include_usage is True
    body += b"more"  # would be a BufferError if anything were a view of it


def test_unknown_fields_are_named_and_the_rest_is_taken(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    decoder, unknown = BodyDecoder(CompletionRequest), UnknownFields()
    for _ in range(2):
        body = bytearray(BODY[:-1] + b'}, "temprature": 0.1, "user": "u", "promt": "b"}')
        assert decoder.decode(body, unknown).n == 2
    assert sorted(m.split("field '")[1].split("'")[0] for m in caplog.messages) == ["promt", "temprature"]


@pytest.mark.parametrize("before", [b"", b'"temprature": 1, '], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("rest", "code", "param"),
    [
        (b'"prompt": "a", "n": "two"}', "invalid_type", "n"),
        (b'"n": 2}', "missing_required_parameter", "prompt"),
        (b'"prompt": "a", "n": 2', "invalid_json", None),
        (b'"prompt": "a", "x": ' + b"[" * 100_000, "invalid_json", None),
    ],
)
def test_what_is_wrong_is_told_in_the_same_words_beside_unknown_fields(before, rest, code, param):
    with pytest.raises(ApiError) as caught:
        BodyDecoder(CompletionRequest).decode(bytearray(b"{" + before + rest), UnknownFields())
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_no_field_is_both_heeded_and_ignored(kind):
    assert not IGNORED.intersection(kind.__struct_fields__)
