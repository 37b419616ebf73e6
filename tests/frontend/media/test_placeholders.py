"""Placeholders: hidden where texts spell them, counted, and grown; and parts of messages that become places."""

import asyncio

import pytest
import seeing_model

from quire.frontend.media import parts, placeholders
from quire.frontend.media.errors import MediaError
from quire.frontend.media.families import family_of
from quire.frontend.text.tokenizer import Tokenizer

FILES = seeing_model.files()
FAMILY, TOKENIZER = family_of(FILES), Tokenizer.from_files(FILES)
PAD = 500


def encode(text, hidden, ends=()):
    return asyncio.run(placeholders.encode(TOKENIZER, FAMILY, text, hidden, False, 4096, ends))


def test_what_a_text_spells_is_text():
    given = {"a": ["x <|image_pad|> y", 1, None], "b": "<|vision_end|><|image_pad|>"}
    value, hidden = placeholders.hide(given, FAMILY)
    assert not any(token in str(value) for token in FAMILY.tokens) and set(hidden.marks) == {"<|image_pad|>", "<|vision_end|>"}
    assert hidden.shown(value["a"][0]) == given["a"][0] and value["a"][1:] == [1, None]
    ids, _ = encode(f"<|vision_start|><|image_pad|><|vision_end|>{value['a'][0]}<|im_end|>", hidden)
    assert ids[:3] == [501, PAD, 502] and ids.count(PAD) == 1
    assert ids[-1] == TOKENIZER.backend.token_to_id("<|im_end|>")
    backend = seeing_model.tokenizer()
    backend_text = type(backend).from_str(backend.to_str())
    backend_text.encode_special_tokens = True
    assert ids[3:-1] == backend_text.encode("x <|image_pad|> y", add_special_tokens=False).ids


def test_marks_are_never_the_same():
    first, second = (placeholders.hide("<|image_pad|>", FAMILY)[0] for _ in range(2))
    assert first != second and len(first) > 32


def test_growing():
    pieces = [[("", 2)], [("", 1)], [("", 3)]]
    grown = placeholders.grow(TOKENIZER, FAMILY, [1, PAD, 2, PAD, PAD, 3], pieces, (0, 2, 6))
    assert grown.ids == [1, PAD, PAD, 2, PAD, PAD, PAD, PAD, 3]
    assert grown.starts == [1, 4, 5] and grown.marks == (0, 3, 9)
    with pytest.raises(MediaError, match="1 places for images, and 2 images"):
        placeholders.grow(TOKENIZER, FAMILY, [PAD], pieces[:2])
    rows = [[("", 2), ("<|im_end|>", 1), ("", 2)]]
    end = TOKENIZER.backend.token_to_id("<|im_end|>")
    assert placeholders.grow(TOKENIZER, FAMILY, [1, PAD, 3], rows, (2,)) == ([1, PAD, PAD, end, PAD, PAD, 3], [1], (6,))


def test_parts_become_places():
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"},
                                     {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
                                     {"type": "input_image", "file_id": "file-1"}]},
    ]  # fmt: skip
    taken, sources = parts.take(messages)
    assert (
        taken[1]["content"] == [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}] and taken[0] is messages[0]
    )
    assert [source.place for source in sources] == ["messages[1].content[1]", "messages[1].content[2]"]
    assert sources[0].low_detail and sources[0].url == "data:,x" and sources[1].file_id == "file-1"
    assert parts.has_media(messages) and not parts.has_media(taken[:1]) and not parts.has_media("x")


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url"}, {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": {"url": 3}},
     {"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, {"type": "input_audio"}, {"type": "image"},
     {"type": "video_url", "video_url": {"url": "x"}}, {"type": "input_image", "file_id": 3}],
)  # fmt: skip
def test_broken_parts_are_refused(part):
    with pytest.raises(MediaError) as caught:
        parts.take([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]"


def test_strings_that_were_cut_out():
    cut = {"w1": memoryview(b"data:image/png;base64,AAAA"), "w2": memoryview(b"BBBB"), "w3": memoryview(b"https://x")}
    content = [
        {"type": "image_url", "image_url": {"url": "w1"}},
        {"type": "image_url", "image_url": {"url": "data:;base64,w2"}},
    ]
    _, sources = parts.take([{"role": "user", "content": content}], cut)
    assert [bytes(source.text) for source in sources] == [b"AAAA", b"BBBB"]
    assert parts.with_cut(content, cut)[1]["image_url"]["url"] == "data:;base64,BBBB"
    with pytest.raises(MediaError):
        parts.take([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "w3"}}]}], cut)


def test_a_processor_that_writes_around_images():
    """Gemma 3's placeholder is another token than that of the embeddings, with line breaks around."""
    files = seeing_model.files("gemma3") | {"config.json": b'{"model_type": "gemma3"}'}
    family, tokenizer = family_of(files), Tokenizer.from_files(files)
    text = "user\n<start_of_image>what<start_of_image>"
    whole = "user\n\n\n<start_of_image><end_of_image>\n\nwhat\n\n<start_of_image><end_of_image>\n\n"
    assert family.written(text, (5, 21, 25)) == (whole, [5, 21 + 18, 25 + 18])
    given = asyncio.run(placeholders.encode(tokenizer, family, text, placeholders.Hidden({}), False, 4096))[0]
    assert given == placeholders.encode_here(tokenizer, family, text, placeholders.Hidden({}))
    assert given == tokenizer.encode(whole, False) and given.count(501) == 2 and 500 not in given
    grown = placeholders.grow(tokenizer, family, given, [[("<start_of_image>", 1), ("", 3)]] * 2)
    first = given.index(501)
    assert grown.ids[first : first + 5] == [501, 500, 500, 500, 502] and grown.starts[0] == first
    hidden = placeholders.hide("<start_of_image>", family)
    ids = placeholders.encode_here(tokenizer, family, f"<start_of_image>{hidden[0]}", hidden[1])
    assert ids.count(501) == 1 and ids.count(502) == 1
