"""Long images are cut out of a body, wherever the APIs send them, and nothing else is."""

import json

import pytest

from quire.frontend.http.api.bodies.cut_strings import MIN_BYTES, cut_images

LONG = "A" * (MIN_BYTES + 9)


def cut(body, indent=None):
    raw = bytearray(json.dumps(body, indent=indent).encode())
    shorter, found = cut_images(raw)
    return json.loads(shorter), {word: bytes(text).decode() for word, text in found.items()}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "body",
    [{"type": "image_url", "image_url": {"url": LONG}}, {"image_url": {"detail": "low", "url": LONG}}, {"image_url": LONG},
     {"source": {"type": "base64", "media_type": "image/png", "data": LONG}}, {"images": [LONG]}],
)  # fmt: skip
def test_images_are_cut(body, indent):
    shorter, found = cut({"messages": [body, {"text": 'x\\"y'}, body]}, indent)
    assert list(found.values()) == [LONG, LONG]
    assert len(json.dumps(shorter)) < 1000
    text = json.dumps(shorter)
    for word in found:
        text = text.replace(word, LONG)
    restored = json.loads(text)
    assert restored == {"messages": [body, {"text": 'x\\"y'}, body]}


def test_all_images_of_a_list():
    shorter, found = cut({"images": [LONG, LONG + "B", LONG]})
    assert [found[word] for word in shorter["images"]] == [LONG, LONG + "B", LONG]


@pytest.mark.parametrize(
    "body",
    [{"text": LONG}, {"prompt": [LONG, LONG]}, {"image_url": {"url": LONG[:MIN_BYTES]}}, {"input": {"data": LONG}},
     {"text": '"image_url": {"url": "' + LONG}, {"image_url": {"url": "A\\n" + LONG}}, {}, [],
     {"a": 1, "b": list(range(40000))}],
)  # fmt: skip
def test_other_strings_stay(body):
    shorter, found = cut(body)
    assert shorter == body and not found


def test_words_cannot_be_guessed():
    words = [next(iter(cut({"image_url": LONG})[1])) for _ in range(2)]
    assert words[0] != words[1] and len(words[0]) > 32
