"""What stands beside tokenizer.json counts as it does for transformers' AutoTokenizer: ids, texts, names, the end of a text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from toy_tokenizers import byte_level

from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import frontend_files, model_summary, tokenizer_eos_id
from quire.enginecore.loading.tokenizer_files import TokenizerFiles, TokenizerFilesError
from quire.frontend.text.tokenizer import Tokenizer

NEXT = byte_level().get_vocab_size()
TEXTS = ["Hello <call> x", "a </think> b", "<|end|>  two <|pad|>", "x<|eos|>", "<call><call>", " <one> ", "naïve <|im_start|>"]


def token(text: str, **flags: bool) -> dict[str, Any]:
    defaults = dict.fromkeys(("special", "lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **defaults, **flags}


def decoder(*tokens: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(NEXT + i): t for i, t in enumerate(tokens)}}


Files = dict[str, dict[str, Any]]  # by name, without .json
CONFIG, MAP, ADDED = "tokenizer_config", "special_tokens_map", "added_tokens"
WAYS: dict[str, Files] = {
    "nothing": {},
    "added_tokens_decoder": {CONFIG: decoder(token("<call>"), token("</think>", special=True))},
    "in another order": {CONFIG: {"added_tokens_decoder": {str(NEXT + 1): token("<call>"), str(NEXT): token("<|end|>")}}},
    "lstrip": {CONFIG: decoder(token("<call>", lstrip=True))},
    "rstrip": {CONFIG: decoder(token("<|end|>", rstrip=True, special=True))},
    "single_word": {CONFIG: decoder(token("<call>", single_word=True))},
    "normalized": {CONFIG: decoder(token("<call>", normalized=True))},
    "a token of tokenizer.json with other flags": {CONFIG: {"added_tokens_decoder": {"2": token("<|im_start|>", rstrip=True)}}},
    "extra_special_tokens": {CONFIG: {"extra_special_tokens": ["<call>", "</think>"]}},
    "extra_special_tokens by name": {CONFIG: {"extra_special_tokens": {"tool_token": "<call>"}}},
    "additional_special_tokens": {CONFIG: {"additional_special_tokens": ["<call>"]}},
    "both lists": {CONFIG: {"additional_special_tokens": ["<call>"], "extra_special_tokens": ["</think>"]}},
    "a name of the model's": {CONFIG: {"image_token": "<call>"}},
    "eos named in the configuration alone": {CONFIG: {"eos_token": "<|end|>"}},
    "eos of the vocabulary": {CONFIG: {"eos_token": "a"}},
    "eos with flags": {CONFIG: {"eos_token": {"__type": "AddedToken", **token("<|end|>", rstrip=True, special=True)}}},
    "pad named in the configuration alone": {CONFIG: {"pad_token": "<|pad|>"}},
    "eos in special_tokens_map.json alone": {MAP: {"eos_token": token("<|end|>", lstrip=True)}},
    "eos in both, which differ": {CONFIG: {"eos_token": "<|eos|>"}, MAP: {"eos_token": "<|end|>"}},
    "a map beside a decoder": {CONFIG: decoder(token("<call>")), MAP: {"eos_token": "<|end|>"}},
    "extra tokens in special_tokens_map.json": {MAP: {"additional_special_tokens": ["<call>", "</think>"]}},
    "added_tokens.json": {ADDED: {"<call>": NEXT, "<one>": NEXT + 1}},
    "added_tokens.json with special ones": {ADDED: {"<call>": NEXT}, CONFIG: {"extra_special_tokens": ["<call>"]}},
    "added_tokens.json beside a decoder": {ADDED: {"<one>": NEXT}, CONFIG: decoder(token("<call>"))},
    "split_special_tokens": {CONFIG: {"split_special_tokens": True, **decoder(token("<call>", special=True))}},
    "unknown fields, and null": {CONFIG: {"eos_token": None, "pad_token": None, "clean_up_tokenization_spaces": False}},
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Files], Path]:
    def folder(files: Files) -> Path:
        byte_level().save(str(tmp_path / "tokenizer.json"))
        base = (
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
            if not files.get(MAP)
            else {"tokenizer_class": "PreTrainedTokenizerFast"}
        )
        for name, content in {**files, CONFIG: {**base, **files.get(CONFIG, {})}}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return folder


@pytest.mark.parametrize("way", WAYS)
def test_a_tokenizer_is_transformers(way, make):
    folder = make(WAYS[way])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_files(frontend_files(folder))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert tokenizer_eos_id(folder) == ours.eos_token_id == theirs.eos_token_id
    for name, text in ours.special_tokens.items():
        assert getattr(theirs, name) == text


def test_a_tokenizer_that_has_all_its_tokens_is_sent_as_it_is(make):
    folder = make({CONFIG: {"eos_token": "</s>", "added_tokens_decoder": {"3": token("</s>", special=True)}}})
    assert frontend_files(folder)["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "additional_chat_templates/x.jinja"]
)
def test_a_file_that_cannot_be_read_is_named(name, make):
    folder = make({})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"[\xff")
    with pytest.raises(TokenizerFilesError, match=name.replace(".", r"\.")):
        TokenizerFiles.read(folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "half a surrogate pair"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "\udfff"}}}, "half a surrogate pair"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}, "ids must be below 4194304"),
        ("special_tokens_map.json", {"pad_token": "\ud800"}, "half a surrogate pair"),
        ("added_tokens.json", {"\ud800": 3}, "half a surrogate pair"),
    ],
)
def test_a_token_that_is_none_is_told_with_its_file(name, content, says, make):
    folder = make({})
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerFilesError, match=f"{name}.*{says}"):
        TokenizerFiles.read(folder)


def test_a_vocabulary_of_billions_is_told_and_not_kept(make):
    folder = make({})
    for size in ((1 << 22) + 1, 1 << 40):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size, "max_position_embeddings": 64}))
        with pytest.raises(ModelFilesError, match=rf"config\.json: vocab_size is {size}: at most 4194304"):
            model_summary(folder)


def test_an_id_of_billions_is_told_and_not_counted_to(make):
    folder = make({})
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["model"]["vocab"]["<far>"] = (1 << 32) - 2
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 3}))
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json: the ids of tokens must be below 4194304"):
        TokenizerFiles.read(folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json: the ids of tokens must be below 4194304, got"):
        Tokenizer.from_files({"tokenizer.json": (folder / "tokenizer.json").read_bytes()})


# ------------------------------------------------------------------------------------------------------- templates
def templates(folder: Path, **given: Any) -> Tokenizer:
    return Tokenizer.from_files(frontend_files(folder, **given))


def test_additional_templates_are_read(make):
    folder = make({CONFIG: {"chat_template": "IN CONFIG"}})
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / f"additional_chat_templates/{name}.jinja").write_text(f"{name} {{{{ messages[0].content }}}}")
    both = templates(folder)
    assert both.template_source() == "IN CONFIG" and both.template_source(with_tools=True).startswith("tool_use")
    assert both.template_source("rag").startswith("rag ")
    (folder / "chat_template.jinja").write_text("IN A FILE")
    assert templates(folder).template_source() == "IN A FILE"
    assert templates(folder).template_source(with_tools=True).startswith("tool_use")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == templates(folder).templates


def test_an_operators_template_takes_the_place_of_all(make):
    folder = make({CONFIG: {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}})
    assert templates(folder).template_source(with_tools=True) == "B"
    assert templates(folder, chat_template="{{ C }}").template_source(with_tools=True) == "{{ C }}"
