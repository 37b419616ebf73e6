"""tiktoken.model: the tokens are those of tiktoken itself with the pattern of Kimi's folders, on random texts."""

import base64
import json
import random

import pytest
import tiktoken
import tiny_models

from quire.enginecore.loading import tiktoken_file
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import frontend_files, model_summary, resolve_tokenizer
from quire.enginecore.loading.tiktoken_file import KIMI, TiktokenFileError, merges_of, read_ranks, tokenizer_of
from quire.frontend.text.tokenizer import Tokenizer

PIECES = (
    "Hello",
    " world",
    "'s",
    "'LL",
    "12345",
    " ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "漢字",
    "你好，世界。",
    "かな",
    "мир",
    "naïve",
    "İstanbul",
    "😀",
    "<|im_end|>",
    "[BOS]",
    "a",
    "B",
    "--",
    "://",
    "e\u0301",
    "\u3000",
    "x𠀀y",
    "Ⅷ",
    "٣٤",
    " , ",
    "\x00",
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>"}  # by their place behind the file's tokens


def random_ranks():
    """All bytes, and a few hundred pairs of tokens, in any order of lengths."""
    rng, tokens = random.Random(0), [bytes([byte]) for byte in range(256)]
    text = "".join(rng.choice(PIECES) for _ in range(4000)).encode()
    tokens += sorted({text[i : i + n] for n in (2, 3, 4, 6) for i in (rng.randrange(len(text)) for _ in range(150))}, key=len)
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A folder as Kimi K2's: Python code instead of a tokenizer.json."""
    folder, ranks = tmp_path_factory.mktemp("kimi"), random_ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('this code must not run')\n")
    decoder = {str(len(ranks) + i): {"content": text, "special": text != "<|im_end|>"} for i, text in NAMED.items()}
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = len(ranks) + 256
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k2", "vocab_size": size, "max_position_embeddings": 512})
    )
    return folder


def oracle(ranks):
    special = {NAMED.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    return tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)


def texts():
    rng = random.Random(1)
    return ["", *PIECES, *("".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 30))) for _ in range(400))]


def test_tokens_are_tiktokens(kimi):
    ranks = read_ranks(kimi / "tiktoken.model")
    want, got = oracle(ranks), tokenizer_of(kimi)
    for text in texts():
        ids = got.encode(text, add_special_tokens=False).ids
        assert ids == want.encode(text, allowed_special="all"), text
        assert got.decode(ids, skip_special_tokens=False) == text


def test_a_folder_without_tokenizer_json_is_served(kimi, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranks = read_ranks(kimi / "tiktoken.model")
    assert resolve_tokenizer(None, kimi) == kimi
    assert model_summary(kimi).eos_token_ids == [len(ranks) + 1]
    tokenizer = Tokenizer.from_files(frontend_files(kimi))
    assert tokenizer.encode("Hello<|im_end|>漢字") == oracle(ranks).encode("Hello<|im_end|>漢字", allowed_special="all")
    assert tokenizer.decode([len(ranks), *tokenizer.encode("Hello"), len(ranks) + 2]) == "Hello<|im_end|>"


def test_merges_are_all_pairs_by_the_rank_of_what_they_make():
    ranks = {b"a": 0, b"b": 1, b"ab": 2, b"ba": 3, b"aba": 4}
    assert merges_of(ranks) == [(b"a", b"b"), (b"b", b"a"), (b"a", b"ba"), (b"ab", b"a")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "tiktoken.model").write_text("YQ== 0\nno line\n"), "line 2 is not a token"),
        (lambda folder: (folder / "tiktoken.model").write_text("YQ== 0\nYg== 2\n"), "ranks are not the numbers from 0 on"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "HYTokenizer"}'),
            "not for HYTokenizer",
        ),
    ],
)
def test_what_cannot_be_read_is_said(change, said, kimi, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (folder / name).write_bytes((kimi / name).read_bytes())
    change(folder)
    with pytest.raises(TiktokenFileError, match=said):
        tokenizer_of(folder)
    with pytest.raises(ModelFilesError, match=said):
        frontend_files(folder)


def test_the_alphabet_is_that_of_byte_level_tokenizers():
    vocabulary = tiny_models.tokenizer().get_vocab()
    assert {name for name in vocabulary if len(name) == 1} <= {*tiktoken_file.byte_characters()}
