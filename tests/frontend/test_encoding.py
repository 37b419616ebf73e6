"""Long prompts: tokenized as short ones are, without the interpreter's lock, and not at all where they can never fit."""

import asyncio

import pytest
import toy_tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.frontend.client import encoding
from quire.frontend.client.stream import TooLong
from quire.frontend.text.token_chars import keeps_characters
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


# ------------------------------------------------------------------------------------------ characters that are no tokens
def absorbing() -> Backend:
    backend = Backend.from_str(toy_tokenizers.byte_level().to_str())
    backend.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True, normalized=False)])
    return backend


def changed(**parts) -> Backend:
    backend = Backend.from_str(toy_tokenizers.byte_level().to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


SHRINKING = normalizers.Replace(Regex(" +"), " ")


@pytest.mark.parametrize(
    ("backend", "keeps"),
    [
        (changed(), True),
        (toy_tokenizers.llama2_like(), True),
        (absorbing(), False),
        (changed(normalizer=SHRINKING), False),
        (changed(normalizer=normalizers.Sequence([normalizers.Prepend("_"), SHRINKING])), False),
        (changed(normalizer=normalizers.NFC()), False),
        (changed(normalizer=normalizers.Replace("ab", "a")), False),
        (changed(normalizer=normalizers.Replace(" ", "_")), True),
        (changed(pre_tokenizer=pre_tokenizers.Whitespace()), False),
        (changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")), False),
        (Backend(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")), False),
    ],
)
def test_a_tokenizer_that_may_lose_characters_is_known(backend, keeps):
    assert keeps_characters(backend) is keeps


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (absorbing(), "<|end|>" + " " * 100_000 + "hello"),
        (changed(normalizer=SHRINKING), "a" + " " * 100_000 + "b"),
        (changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "a" + "\n" * 100_000 + "b"),
    ],
)
@pytest.mark.parametrize("max_model_len", [16, 256])
def test_few_tokens_of_many_characters_are_not_too_long(backend, text, max_model_len):
    tokenizer = Tokenizer(backend)
    ids = backend.encode(text).ids
    assert len(ids) < 16
    assert asyncio.run(encoding.encode_prompt(tokenizer, text, True, max_model_len)) == ids
    for keep in (1, 2, 3, 100):
        for at_start in (True, False):
            end = asyncio.run(encoding.encode_end(tokenizer, text, True, keep, at_start, max_model_len))
            assert (end[:keep] if at_start else end[-keep:]) == (ids[:keep] if at_start else ids[-keep:])


@pytest.mark.parametrize("backend", [absorbing(), changed(normalizer=SHRINKING)])
def test_too_many_tokens_of_such_a_tokenizer_are_seen_in_the_first_parts(backend):
    counted = []

    class Counting(Tokenizer):
        def count(self, text):
            counted.append(len(text))
            return super().count(text)

    tokenizer = Counting(backend)
    with pytest.raises(TooLong, match="more than 1000 tokens"):
        asyncio.run(encoding.encode_prompt(tokenizer, "hello world " * 500_000, True, 1000))
    assert len(counted) == 1


def test_the_end_of_a_long_text_is_the_wholes(tokenizer):
    text = "the cat hello world! " * 3000
    ids = tokenizer.encode(text)
    for backend in (tokenizer.backend, absorbing()):
        one = Tokenizer(backend)
        assert asyncio.run(encoding.encode_end(one, text, True, 50, False, 64))[-50:] == ids[-50:]
        assert asyncio.run(encoding.encode_end(one, text, True, 50, True, 64))[:50] == ids[:50]
