"""Outputs of a model in Harmony for tests, and what they mean: made from a seed, half of them cut off or with wrong headers.

A case is a list of pieces: a marker, for that special token, or a text. harmony_oracle.py asks openai-harmony what the cases
mean and writes harmony_readings.json; the tests compare HarmonyParser with that.
"""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.frontend.text.harmony.parser import HarmonyParser
from quire.frontend.text.harmony.tokens import CALL, CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, RETURN, START
from quire.frontend.text.output_events import Arguments, CallBegun, Content, Reasoning

NUM_CASES = 1000
READINGS = Path(__file__).parent / "harmony_readings.json"
_TEXTS = [
    "The user says hi.",
    "Hello!",
    "Größe ✓ 漢字",
    "a\nb",
    " ",
    "",
    "to=functions.f",
    "<",
    "<|end|>",
    "<|channel|>final",
    "assistant",
    "x" * 40,
    "😀",
    "final<|message|>",
]
_WORDS = [
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    " json",
    "assistant",
    "user",
    " ",
    "foo",
    ": ",
    "functions.g",
    CONSTRAIN,
    CHANNEL,
    START,
    " to=assistant",
    "\n",
]


_CALLED = re.compile(r"functions\.[\w.-]+", re.ASCII)


@cache
def harmony_tokenizer() -> Tokenizer:
    """A token for each byte, then <|endoftext|> and Harmony's markers as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", *MARKERS)])
    return tokenizer


def text_ids(text: str) -> list[int]:
    """A text in ordinary tokens, also if it names a marker."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ((chars, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [("", None)]
    return [alphabet[char] for char in chars]


def ids_of(pieces: list[str]) -> list[int]:
    """A case's token ids. A piece that is a marker is that token; a text with a blank in front of a marker never is one."""
    ids: list[int] = []
    for piece in pieces:
        marker = harmony_tokenizer().token_to_id(piece) if piece in MARKERS else None
        ids += [marker] if marker is not None else text_ids(piece.removeprefix("\x00"))
    return ids


# --------------------------------------------------------------------------------------------------------------- cases
def cases() -> list[list[str]]:
    """Pieces that begin with NUL are texts, even if they name a marker; the NUL does not count."""
    draw = random.Random(37)
    return [_case(draw, i) for i in range(NUM_CASES)]


def _case(draw: random.Random, i: int) -> list[str]:
    pieces = _output(draw)
    if i % 4 == 1:
        return _cut(draw, pieces)
    if i % 4 == 3:
        return _damaged(draw, pieces)
    return pieces


def _output(draw: random.Random) -> list[str]:
    pieces: list[str] = []
    for n in range(draw.randint(1, 4)):
        pieces += [START, "assistant"] if n else []
        pieces += _message(draw)
    pieces[-1] = draw.choice([RETURN, CALL, END])
    return pieces


def _message(draw: random.Random) -> list[str]:
    body = [MESSAGE, *("\x00" + draw.choice(_TEXTS) for _ in range(draw.randint(0, 3))), END]
    match draw.randrange(6):
        case 0 | 1:
            return [CHANNEL, "analysis", *body]
        case 2:
            return [CHANNEL, "commentary", *body]
        case 3:
            arguments = json.dumps({"a": draw.choice(_TEXTS)}, ensure_ascii=False)
            body = [MESSAGE, "\x00" + arguments, draw.choice([CALL, END])]
            kind = draw.choice([[" ", CONSTRAIN, "json"], [" json"], [CONSTRAIN, "json"], [], [" code"]])
            name = draw.choice(["f", "get_weather", "a-b.c"])
            if draw.random() < 0.5:
                return [CHANNEL, draw.choice(["commentary", "analysis"]), f" to=functions.{name}", *kind, *body]
            return [f" to=functions.{name}", CHANNEL, "commentary", *kind, *body]
        case 4:
            return [CHANNEL, "final", *draw.choice([[], [" ", CONSTRAIN, "json"], [" json"]]), *body]
    return [CHANNEL, "final", *body]


def _cut(draw: random.Random, pieces: list[str]) -> list[str]:
    pieces = pieces[: draw.randint(1, len(pieces))]
    if pieces[-1] not in MARKERS and len(pieces[-1]) > 2:
        pieces[-1] = pieces[-1][: draw.randint(1, len(pieces[-1]))]
    return pieces


def _damaged(draw: random.Random, pieces: list[str]) -> list[str]:
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(pieces))
        match draw.randrange(4):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, draw.choice(_WORDS))
            case 2:
                pieces[at] = draw.choice(_WORDS)
            case 3:
                pieces.insert(at, draw.choice(MARKERS))
        pieces = pieces or ["\x00x"]
    return pieces


# ------------------------------------------------------------------------------------------------------------ meanings
def meaning(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client gets of messages as openai-harmony reads them: by vLLM's rules for channels and recipients."""
    result: dict[str, Any] = {"reasoning": [], "content": [], "calls": []}
    for message in messages:
        channel, recipient, text = message["channel"], message["recipient"] or "", message["text"]
        if message["role"] != "assistant":
            continue
        if _CALLED.fullmatch(recipient) and channel != "final":
            result["calls"].append([recipient.removeprefix("functions."), text if text.strip() else text + "{}"])
        elif text:
            result["reasoning" if channel == "analysis" else "content"].append(text)
    return result


def summary(events: list[Any]) -> dict[str, Any]:
    """The same of a parser's events."""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            calls[event.index][1] += event.text
    texts = {kind: "".join(e.text for e in events if isinstance(e, kind)) for kind in (Reasoning, Content)}
    return {"reasoning": texts[Reasoning], "content": texts[Content], "calls": calls}


def parse(pieces: list[str], **options: Any) -> list[Any]:
    """The events of a text, with marks, that comes in these pieces."""
    parser = HarmonyParser(new_id=lambda: "id", **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def write_checkpoint(folder: Path, template: str) -> None:
    """A tiny random gpt-oss with this tokenizer, and its three tokens that end an output."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    ends = [harmony_tokenizer().token_to_id(text) for text in (RETURN, "<|endoftext|>", CALL)]
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        num_local_experts=4,
        num_experts_per_tok=2,
        eos_token_id=ends,
        pad_token_id=None,
        initializer_range=0.2,
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(harmony_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": RETURN, "chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
