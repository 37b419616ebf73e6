"""Long prompts: tokenized as short ones are, without the interpreter's lock, and not at all where they can never fit."""

import asyncio

import pytest
import toy_tokenizers

from quire.frontend.client import encoding
from quire.frontend.client.stream import TooLong
from quire.frontend.text.tokenizer import LONG_TEXT, Tokenizer, TooManyTokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(toy_tokenizers.files())


def test_long_texts_are_encoded_as_short_ones_are(tokenizer):
    text = "the cat hello world! " * 1000
    assert len(text) > LONG_TEXT
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids
    assert tokenizer.count(text) == len(tokenizer.encode(text, add_special_tokens=False))
    with pytest.raises(TooManyTokens, match="more than 100"):
        tokenizer.encode(text, most=100)
    assert tokenizer.decode(tokenizer.encode(text, False)) == text


def test_a_text_that_is_much_too_long_is_not_tokenized_as_a_whole(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "MOST_TOKENS", 1000)
    counted, count = [], tokenizer.count
    monkeypatch.setattr(tokenizer, "count", lambda text: (counted.append(len(text)), count(text))[1])

    def encode(text, max_model_len):
        return asyncio.run(encoding.encode_prompt(tokenizer, text, False, max_model_len))

    longest = tokenizer.max_token_chars
    with pytest.raises(TooLong, match="characters, more than 50000"):
        encode("a" * (50_000 * longest + 1), 50_000)
    text = "a b " * 50_000
    with pytest.raises(TooLong, match="more than 22000 tokens"):
        encode(text, 22_000)
    assert 1 <= len(counted) < 4
    assert encode(text, len(text)) == tokenizer.backend.encode(text, add_special_tokens=False).ids
