"""TokenizerFiles: puts added tokens, special tokens and chat templates of the files beside tokenizer.json into two files.

`transformers` reads tokenizer_config.json, special_tokens_map.json, added_tokens.json and additional_chat_templates/ beside
tokenizer.json, and adds the tokens that only these have. `TokenizerFiles.read` does the same once, at launch, so that the core
and every frontend see one tokenizer.json with all tokens, and one tokenizer_config.json with all names. The source is
transformers 5.23, tokenization_utils_base.py `_from_pretrained` and tokenization_utils_tokenizers.py.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.ipc.text_config import MAX_VOCABULARY

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerFilesError(ValueError):
    """A file of the tokenizer cannot be read; the text names it."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token as tokenizer.json has it, without its id. The defaults are those of `tokenizers.AddedToken`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _NumberedToken(AddedToken, frozen=True):
    id: int = -1

    def plain(self) -> AddedToken:
        return AddedToken(self.content, *(getattr(self, flag) for flag in _FLAGS))


class _AddedTokensOnly(msgspec.Struct):
    """The part of tokenizer.json that is needed first; msgspec skips the megabytes of the rest without building them."""

    added_tokens: list[_NumberedToken] = []


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _VocabularyOnly(msgspec.Struct):
    model: _Vocabulary


class TokenizerFiles(NamedTuple):
    """A tokenizer's two files, complete. config: tokenizer_config.json's fields, with the names of special tokens as texts."""

    tokenizer_json: bytes
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, tokenizer_json: bytes | None = None) -> "TokenizerFiles":
        """Read a folder. tokenizer_json: replaces the folder's own, for example by a converted one; it must have all tokens
        already. Raises TokenizerFilesError."""
        settings = _Settings.read(folder)
        if tokenizer_json is None:
            tokenizer_json = _with_tokens(folder, (folder / "tokenizer.json").read_bytes(), settings)
        config = {**settings.config, **{name: token.content for name, token in settings.named.items()}}
        templates = _templates(folder, config.get("chat_template"))
        return cls(tokenizer_json, {**config, "chat_template": templates} if templates else config)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that the configuration names eos_token, if the tokenizer has it."""
        text = self.config.get("eos_token")
        if not isinstance(text, str):
            return None
        for token in msgspec.json.decode(self.tokenizer_json, type=_AddedTokensOnly).added_tokens:
            if token.content == text:
                return token.id
        vocab = msgspec.json.decode(self.tokenizer_json, type=_VocabularyOnly).model.vocab
        if isinstance(vocab, dict):
            return vocab.get(text)
        return next((number for number, (piece, _) in enumerate(vocab) if piece == text), None)


class _Settings(NamedTuple):
    """The tokens in the files beside tokenizer.json."""

    config: dict[str, Any]
    added: dict[int, AddedToken]  # by id
    named: dict[str, AddedToken]  # eos_token and its like, and a model's own names (image_token)
    others: list[AddedToken]  # special tokens without a name

    @classmethod
    def read(cls, folder: Path) -> "_Settings":
        config = _object(folder / "tokenizer_config.json")
        decoder = config.get("added_tokens_decoder")
        if isinstance(decoder, dict):  # the present format, with which files of older formats are ignored
            added = {_id(key, folder): _token(value) for key, value in decoder.items() if key.isdecimal() and _is_token(value)}
        else:
            config |= _object(folder / "special_tokens_map.json")
            added = _legacy_added(_object(folder / "added_tokens.json"), config)
        by_text = {token.content: token for token in added.values()}
        names = {key: value for key, value in config.items() if key.endswith("_token") and _is_token(value)}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            names |= {key: value for key, value in extra.items() if _is_token(value)}
            extra = []
        named = {key: token for key, value in names.items() if (token := _token(value, special=True)).content}
        named = {key: by_text.get(token.content, token) if key in NAMED_TOKENS else token for key, token in named.items()}
        others = [_token(value, special=True) for value in extra if _is_token(value)] if isinstance(extra, list) else []
        return cls(config, added, named, others)

    def missing_from(self, known: list[AddedToken]) -> list[AddedToken]:
        """Tokens to add to those that tokenizer.json has, in the order of their ids and then of their names."""
        missing = [self.added[number] for number in sorted(self.added) if self.added[number] not in known]
        texts = {token.content for token in (*known, *missing)}
        for token in (*self.named.values(), *self.others):
            if token.content not in texts:
                texts.add(token.content)
                missing.append(msgspec.structs.replace(token, special=True))
        special = {token.content for token in self.named.values()} | {token.content for token in known if token.special}
        return [msgspec.structs.replace(t, special=True) if t.content in special else t for t in missing]


def _with_tokens(folder: Path, tokenizer_json: bytes, settings: _Settings) -> bytes:
    """tokenizer.json with the tokens that it lacks; the very same bytes if it lacks none."""
    try:
        known = [token.plain() for token in msgspec.json.decode(tokenizer_json, type=_AddedTokensOnly).added_tokens]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TokenizerFilesError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
    missing = settings.missing_from(known)
    if not missing:
        return tokenizer_json
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise TokenizerFilesError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
    if max(backend.get_vocab(with_added_tokens=True).values(), default=0) >= MAX_VOCABULARY:  # written, gaps would be filled
        raise TokenizerFilesError(f"{folder / 'tokenizer.json'}: the ids of tokens must be below {MAX_VOCABULARY}")
    backend.add_tokens([tokenizers.AddedToken(**msgspec.to_builtins(token)) for token in missing])
    return backend.to_str().encode()


def _id(key: str, folder: Path) -> int:
    if len(key) > len(str(MAX_VOCABULARY)):
        raise TokenizerFilesError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {key:.40} is no token's id: ids must be below "
            f"{MAX_VOCABULARY}"
        )
    return int(key)


def _legacy_added(added: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens by id from added_tokens.json (text -> id). Those that the configuration names are special."""
    special = {_token(config[name]).content for name in NAMED_TOKENS if _is_token(config.get(name))}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    special |= {_token(value).content for value in extra if _is_token(value)} if isinstance(extra, list) else set()
    return {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in added.items()
        if type(number) is int
    }


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _token(value: Any, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        # `tokenizers` does not normalize special tokens unless it is told to
        return AddedToken(value, normalized=not special, special=special)
    flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
    is_special = bool(flags.pop("special", special))
    return AddedToken(value["content"], special=is_special, **{"normalized": not is_special, **flags})


def _templates(folder: Path, template: Any) -> list[dict[str, str]]:
    """All templates, in the form of named ones in tokenizer_config.json; [] if there are no additional templates."""
    more = dict(_additional(folder))
    if not more:
        return []
    if isinstance(template, str):
        more = {"default": template, **more}
    elif isinstance(template, list):
        more = {
            str(t["name"]): str(t["template"]) for t in template if isinstance(t, dict) and {"name", "template"} <= t.keys()
        } | more
    return [{"name": name, "template": text} for name, text in more.items()]


def _additional(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja")):
        try:
            yield path.stem, path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerFilesError(f"{path} cannot be read: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerFilesError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{path} is not a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TokenizerFilesError(f"{path} holds half a surrogate pair, which is no character") from None
    return value
