"""Tokenizer: text to ids, ids to text, chats to prompts, from the files that the core sends, without transformers.

`Tokenizer.from_files` takes file names and bytes: tokenizer.json (required), tokenizer_config.json, special_tokens_map.json,
chat_template.jinja, generation_config.json. A Tokenizer is immutable, so threads may share it. It does not download or convert
anything (the core does), keep state for a request (detokenizer.py), or guess a missing chat template.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import msgspec
import tokenizers

from quire.frontend.text.chat_template import ChatTemplate, ChatTemplateError, Message
from quire.frontend.text.detokenizer import IncrementalDetokenizer
from quire.frontend.text.prompt_marks import places, render_marked, without_marks
from quire.frontend.text.token_bytes import Pieces
from quire.frontend.text.token_chars import keeps_characters
from quire.ipc.generation_config import generation_defaults
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import MAX_BAD_WORD_TOKENS
from quire.ipc.text_config import MAX_VOCABULARY

LONG_TEXT = 2 << 10  # characters; tokenizing them takes some 4 ms
_DECODED_AT_ONCE = 4096  # tokens
_TEXTS_AT_ONCE = 512  # tokenizers keeps the interpreter's lock while it takes texts and while their encodings are freed
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_NOTHING: Mapping[str, str] = MappingProxyType({})


class TooManyTokens(ValueError):
    """A text has more tokens than the caller allows."""


# arguments of transformers' apply_chat_template that are not variables of a template
_OF_TENSORS = ("return_tensors", "return_dict", "return_assistant_tokens_mask", "padding", "truncation", "max_length")


class ChatPrompt(NamedTuple):
    """A conversation as a prompt. template: its chat template's source. marks: of prompt_marks.py, in tokens. items: its media,
    PlacedItems (client/media.py)."""

    text: str
    template: str
    marks: tuple[int, ...] = ()
    items: tuple[Any, ...] = ()


class SplitIds(list[int]):
    """Ids of two kinds. second: where those of the second kind begin; 0: there are none."""

    def __init__(self, ids: Sequence[int], second: int = 0) -> None:
        super().__init__(ids)
        self.second = second


class PairIds(SplitIds):
    """The ids of two texts. second: where the tokens of the second type begin; 0: the tokenizer gives all one type."""

    def __init__(self, before: Sequence[int], ids: Sequence[int], types: Sequence[int]) -> None:
        super().__init__([*before, *ids], len(before) + types.index(1) if 1 in types else 0)


class Tokenizer:
    """A model's tokenizer. `backend` is the `tokenizers` object behind it.

    special_tokens: name -> text ("eos_token": "</s>"); special_ids: those that skip_special_tokens leaves out; added_ids: all
    tokens added to the model's own vocabulary, special or not; vocab_size: highest id + 1 (a model's may be larger).
    max_token_chars: length of the longest token. keeps_characters: each character of a text is in some token, so a text of more
    than n * max_token_chars characters has more than n tokens; others absorb blanks, or shorten the text first.
    generation_defaults: SamplingParams fields set by generation_config.json. config: tokenizer_config.json's fields.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool((config or {}).get("split_special_tokens"))  # then they are text like any other
        self.backend = backend
        self.config = config = dict(config or {})
        self.special_tokens = {n: text for n in _NAMED_TOKENS if (text := _token_text(config.get(n))) is not None}
        added = backend.get_added_tokens_decoder()
        named = {i for text in self.special_tokens.values() if (i := backend.token_to_id(text)) is not None}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"tokenizer.json: the ids of tokens must be below {MAX_VOCABULARY}, got {self.vocab_size - 1}")
        self.max_token_chars = max(map(len, vocab), default=1)
        self.keeps_characters = keeps_characters(backend)
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special) | (named & self.added_ids)
        self.pieces = Pieces(backend, self.special_ids)
        self.generation_defaults = generation_defaults(generation_config or {})
        self.templates = dict(chat_templates or {})
        self._content_format = config.get("chat_template_content_format")  # set by the engine's operator
        self._add_bos = _bos_to_add(backend, config, self.bos_token_id)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Raises ValueError, naming the file, if one is missing or cannot be read."""
        if "tokenizer.json" not in files:
            raise ValueError("tokenizer.json is missing")
        try:
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        config = {**_json(files, "special_tokens_map.json"), **_json(files, "tokenizer_config.json")}
        templates = _templates_of(config.get("chat_template"))
        if "chat_template.jinja" in files:
            templates["default"] = config["chat_template"] = files["chat_template.jinja"].decode()
        return cls(backend, config, templates, _json(files, "generation_config.json"))

    # ------------------------------------------------------------------------------------------------------------- ids
    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Ids of tokens in the vocabulary's spelling, e.g. `<|eot_id|>`; None for a token that it lacks."""
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def _named_id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text. Special tokens that are spelled out in it are recognized.

        Long texts are tokenized without the interpreter's lock. Raises TooManyTokens for more than `most` tokens.
        """
        return self.encode_marked(text, add_special_tokens, (), most)[0]

    def encode_marked(
        self, text: str, add_special_tokens: bool, ends: Sequence[int], most: int | None = None
    ) -> tuple[list[int], tuple[int, ...]]:
        """As `encode`, and how many of the ids lie before each of `ends`, numbers of characters.

        A token that reaches beyond one is not counted: what precedes it is equal for all texts that are equal up to there."""
        text = _encodable(text)
        if len(text) <= LONG_TEXT:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # the fast one knows no characters
            encode_batch = self.backend.encode_batch if ends else self.backend.encode_batch_fast
            (encoding,) = encode_batch([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(f"the text has {len(encoding)} tokens, more than {most}")
        bos = self._add_bos if self._add_bos and add_special_tokens else []
        found = [len(encoding) if end >= len(text) else encoding.char_to_token(end) for end in ends]
        marks = tuple(len(bos) + mark for mark in found if mark is not None)
        return [*bos, *encoding.ids] if bos else encoding.ids, marks

    def count(self, text: str) -> int:
        """The number of a text's tokens, without special tokens around it."""
        (encoding,) = self.backend.encode_batch_fast([_encodable(text)], add_special_tokens=False)
        return len(encoding)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for many texts, on all cores."""
        prefix, found = self._add_bos if add_special_tokens else [], list[list[int]]()
        for at in range(0, len(texts), _TEXTS_AT_ONCE):
            part = [_encodable(text) for text in texts[at : at + _TEXTS_AT_ONCE]]
            rows = self.backend.encode_batch_fast(part, add_special_tokens=add_special_tokens)
            found += [[*prefix, *row.ids] for row in rows]
        return found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The ids of two texts each, PairIds, joined as the tokenizer's files say, on all cores."""
        found = list[list[int]]()
        for at in range(0, len(pairs), _TEXTS_AT_ONCE):
            part = [(_encodable(first), _encodable(second)) for first, second in pairs[at : at + _TEXTS_AT_ONCE]]
            rows = self.backend.encode_batch_fast(part, add_special_tokens=True)
            found += [PairIds(self._add_bos, row.ids, row.type_ids) for row in rows]
        return found

    @cached_property
    def around(self) -> tuple[int, int]:
        """The numbers of special tokens that are put before and behind a text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        before = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return before, max(len(whole) - before - len(bare), 0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        """The text of these ids; the same as an IncrementalDetokenizer makes of them in any portions."""
        text, parts = IncrementalDetokenizer(self, _TextParams(skip_special_tokens, spaces_between_special_tokens)), []
        for start in range(0, len(ids), _DECODED_AT_ONCE):  # all at once would block the interpreter
            parts.append(text.push(ids[start : start + _DECODED_AT_ONCE]))
        return "".join([*parts, text.push((), finished=True)])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds after another one: part of a character, one, or many."""
        return self.pieces.all[token_id]

    def token_str(self, token_id: int) -> str:
        """`token_bytes` as text, for logprobs, with U+FFFD for incomplete characters."""
        return self.pieces.all[token_id].decode(errors="replace")

    def token_piece(self, token_id: int) -> str:
        """The token in the vocabulary's spelling, e.g. "Ġthe"; empty for an id that it lacks."""
        return self.backend.id_to_token(token_id) or ""

    # ----------------------------------------------------------------------------------------------------------- chats
    def template_source(self, override: str | None = None, with_tools: bool = False) -> str:
        """The source of the model's template ("tool_use" with tools, if it has one), or of `override`: a name or a template.

        Raises ChatTemplateError if there is none.
        """
        if override is not None:
            return self.templates.get(override, override)
        if with_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if self.templates:
            raise ChatTemplateError(f"choose a chat template by name; the model has {', '.join(sorted(self.templates))}")
        raise ChatTemplateError("the model has no chat template; give one with the request or at launch, or use completions")

    def template(self, override: str | None, with_tools: bool) -> tuple[str, str | None]:
        """(`template_source`, `content_format`), for a rendering in another process. Raises ChatTemplateError."""
        return self.template_source(override, with_tools), self.content_format()

    def content_format(self, wanted: str = "auto") -> str | None:
        """The content format of a ChatTemplate. auto: the operator's choice; None if there is none."""
        return self._content_format if wanted == "auto" else wanted

    def render_chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        placeholders: Mapping[str, str] = _NOTHING,
    ) -> str:
        """A conversation as prompt text (see ChatTemplate.render). Encode it with add_special_tokens=False, because templates
        write BOS themselves. placeholders: as for ChatTemplate. Raises ChatTemplateError."""
        source, form = self.template_source(chat_template, bool(tools)), self.content_format(chat_template_content_format)
        return ChatTemplate(source, self.special_tokens, form, placeholders).render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs or {},
        )

    def render_marked_chat(
        self,
        messages: list[Message],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        **options: Any,
    ) -> tuple[str, list[int]]:
        """As `render_chat`, and the prompt's marks in characters, for `encode_marked`. Raises ChatTemplateError."""
        source = self.template_source(chat_template, bool(options.get("tools")))
        template = ChatTemplate(source, self.special_tokens, self.content_format(chat_template_content_format))
        at = places(messages, bool(options.get("tools")))
        return render_marked(template, without_marks(messages), at, variables=chat_template_kwargs or {}, **options)

    def apply_chat_template(
        self,
        conversation: list[Message],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """`render_chat` with the signature of transformers: returns the prompt's token ids, or its text with tokenize=False.

        variables: the template's. Raises ChatTemplateError; TypeError for options that ask for tensors.
        """
        if tensors := [name for name in _OF_TENSORS if variables.pop(name, None)]:
            raise TypeError(f"{tensors[0]} is not supported: apply_chat_template returns a text or a list of token ids")
        text = self.render_chat(
            conversation,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    # ---------------------------------------------------------------------------------------------------------- params
    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The params with bad_words_token_ids. Raises ValueError for too many or too long words."""
        if not params.bad_words:
            return params
        return msgspec.structs.replace(params, bad_words_token_ids=self.bad_word_ids(params.bad_words))

    def bad_word_ids(self, bad_words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word at the beginning of a text, and of the word after a space unless they end in the same tokens.

        vLLM omits the form after a space if it has another length, and so allows " there" if "there" is two tokens. Raises
        ValueError for a word that is too long or has no tokens.
        """
        words, rows = [word.lstrip() for word in bad_words], list[list[int]]()
        for word in words:
            if self.keeps_characters and len(word) > MAX_BAD_WORD_TOKENS * self.max_token_chars:
                raise ValueError(
                    f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens long, this is longer: {word[:64]!r}"
                )
        spaced_words = self.encode_batch([" " + word for word in words], add_special_tokens=False)
        for word, bare, spaced in zip(words, self.encode_batch(words, add_special_tokens=False), spaced_words, strict=True):
            if not bare:
                raise ValueError(f"bad_words: {word!r} has no tokens")
            rows.append(bare)
            if spaced[-len(bare) :] != bare:
                rows.append(spaced)
        return rows


class _TextParams(NamedTuple):
    """The params of `decode` (detokenizer.TextParams)."""

    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    structured_outputs: None = None


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _templates_of(value: Any) -> dict[str, str]:
    """Templates by name: tokenizer_config.json has one template, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(t["name"]): str(t["template"]) for t in value if isinstance(t, dict) and {"name", "template"} <= t.keys()}
    return {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _bos_to_add(backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_id: int | None) -> list[int]:
    """The BOS to add: some models have add_bos_token in tokenizer_config.json, and no BOS in tokenizer.json."""
    if config.get("add_bos_token") is not True or bos_id is None:
        return []
    return [] if bos_id in backend.encode("", add_special_tokens=True).ids else [bos_id]


def _encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON may contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
