"""Prompts for `quire bench`: random ones of given lengths, conversations of a ShareGPT file, or prompts of a JSON-lines file.

Prompts depend only on the seed. With a tokenizer they are texts of the given number of tokens. Without one they are token ids
for completions, and as many short words for chats; their real length is in the server's usage.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FIRST_ID, END_ID = 10, 1000  # token ids that every vocabulary has
WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be")
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # limits for conversations of a ShareGPT file, as in vLLM


class DatasetError(ValueError):
    """No prompts can be made; the text is for the user."""


class Request(NamedTuple):
    """prompt: a text or token ids; a list of these where one request holds several. images: data: URLs, which a chat has
    before its text."""

    prompt: Any
    prompt_len: int
    output_len: int
    images: tuple[str, ...] = ()


def load_tokenizer(name: str | None) -> Any:
    """The `tokenizers.Tokenizer` of a folder or a hub id; None for None. Raises DatasetError."""
    if name is None:
        return None
    import tokenizers

    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        import huggingface_hub

        return tokenizers.Tokenizer.from_file(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # the hub's errors, or `tokenizers`' bare Exception
        raise DatasetError(f"--tokenizer {name}: {(str(error).splitlines() or [''])[0]}") from None


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
    tokenizer: Any = None,
    as_words: bool = False,
) -> list[Request]:
    """Lengths are uniform in [n (1 - ratio), n (1 + ratio)]; all begin with the same prefix_len tokens."""
    rng = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        low, high = int(length * (1 - range_ratio)), int(np.ceil(length * (1 + range_ratio)))
        return rng.integers(max(low, 1), max(high, 1) + 1, count).tolist()

    lengths = list(zip(draw(input_len), draw(output_len), strict=True))
    prefix = rng.integers(FIRST_ID, END_ID, prefix_len).tolist()
    rows = [[*prefix, *rng.integers(FIRST_ID, END_ID, n_in).tolist()] for n_in, _ in lengths]
    return [_request(row, n_out, tokenizer, as_words) for row, (_, n_out) in zip(rows, lengths, strict=True)]


def _request(ids: list[int], output_len: int, tokenizer: Any, as_words: bool) -> Request:
    if tokenizer is not None:
        text = _text_of(tokenizer, ids)
        return Request(text, len(tokenizer.encode(text, add_special_tokens=False).ids), output_len)
    prompt = " ".join(WORDS[i % len(WORDS)] for i in ids) if as_words else ids
    return Request(prompt, len(ids), output_len)


def _text_of(tokenizer: Any, ids: list[int]) -> str:
    """A text of as many tokens. Decoding and encoding may change the number of ids, so a few rounds may be needed."""
    wanted = len(ids)
    for _ in range(4):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) == wanted:
            break
        ids = ids[:wanted] if len(ids) > wanted else ids + ids[: wanted - len(ids)]
    return text


def sharegpt_requests(path: str, count: int, output_len: int | None, seed: int, tokenizer: Any) -> list[Request]:
    """First questions of a ShareGPT file's conversations, each with its answer's length, or output_len. Raises DatasetError."""
    if tokenizer is None:
        raise DatasetError("--dataset-name sharegpt counts tokens: it needs --tokenizer")
    data = _json_file(path)
    if not isinstance(data, list):
        raise DatasetError(f"{path} is not a list of conversations")
    pairs = [_question_and_answer(entry) for entry in data]
    found = list[Request]()
    for i in np.random.default_rng(seed).permutation(len(pairs)):
        if (pair := pairs[i]) is None:
            continue
        n_in, n_out = (len(tokenizer.encode(text, add_special_tokens=False).ids) for text in pair)
        n_out = output_len if output_len is not None else n_out
        if min(n_in, n_out) >= MIN_TOKENS and n_in <= MAX_PROMPT and n_in + n_out <= MAX_TOTAL:
            found.append(Request(pair[0], n_in, n_out))
        if len(found) == count:
            break
    return repeated(found, count, path)


def _question_and_answer(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    question, answer = (turn.get("value") for turn in turns[:2])
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def custom_requests(path: str, count: int, output_len: int, tokenizer: Any) -> list[Request]:
    """Lines of JSON with a `prompt` and maybe `output_tokens`. Raises DatasetError."""
    found = list[Request]()
    try:
        lines = [line for line in Path(path).read_bytes().split(b"\n") if line.strip()]  # JSON may hold other line breaks
        for line in lines[:count]:
            entry = json.loads(line)
            text = entry["prompt"]
            length = len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer is not None else len(text.split())
            found.append(Request(text, length, int(entry.get("output_tokens", output_len))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}, line {len(found) + 1}: {type(error).__name__}: {error}") from None
    return repeated(found, count, path)


def repeated(found: list[Request], count: int, path: str) -> list[Request]:
    """`count` requests, repeating those found if there are fewer."""
    if not found:
        raise DatasetError(f"{path} has no prompt that can be used")
    return [found[i % len(found)] for i in range(count)]


def _json_file(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
