"""A tokenizer.json from a tiktoken.model: lines of a token in base64 and its rank, as Kimi K2's folders have it.

The file has neither the pattern by which texts are cut before tokens are merged, nor special tokens. Folders bring Python code
for these; it is not run. The pattern belongs to the model's family, and tokenizer_config.json names special tokens. Called by
convert_tokenizer.py, in a process of its own. Imports no transformers.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

FILE = "tiktoken.model"

# Moonshot AI's (Kimi, Moonlight): runs of Chinese characters are cut off from other letters.
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
KIMI_CLASS = "TikTokenTokenizer"  # of the folder's Python code
KIMI_TYPES = ("kimi_k2", "kimi_k25", "kimi_vl", "kimi_linear")
RESERVED = 256  # ids behind the file's tokens, for special tokens; those without a name are <|reserved_token_ID|>


class TiktokenFileError(ValueError):
    """The folder's tiktoken.model cannot be read, or its family is not known."""


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with a tiktoken.model. Raises TiktokenFileError."""
    settings = _object(folder / "tokenizer_config.json")
    pattern = _pattern(folder, settings)
    ranks = read_ranks(folder / FILE)
    characters = byte_characters()
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [(names[left], names[right]) for left, right in merges_of(ranks)]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = _special_tokens(settings, len(ranks))
    tokenizer.add_tokens(list(special.values()))
    for number, token in special.items():
        if tokenizer.token_to_id(token.content) != number:
            raise TiktokenFileError(f"{FILE}: {token.content!r} is to be token {number}, but the file has it already")
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """The file's tokens with their ranks, which are their ids. Raises TiktokenFileError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TiktokenFileError(f"{FILE}: line {number} is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TiktokenFileError(f"{FILE}: ranks are not the numbers from 0 on")
    return ranks


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that together are a token, in the order in which tiktoken merges: by the rank of what they make."""
    found: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        found += sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]])
        )
    return found


def _pattern(folder: Path, settings: dict[str, Any]) -> str:
    mapped = settings.get("auto_map")
    classes = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else None
    names = [settings.get("tokenizer_class"), *(classes if isinstance(classes, list) else [classes])]
    kind = _object(folder / "config.json").get("model_type")
    if kind in KIMI_TYPES or any(str(name).rpartition(".")[2] == KIMI_CLASS for name in names):
        return KIMI
    raise TiktokenFileError(
        f"{FILE} lacks the pattern by which texts are cut; it is known for Kimi's ({KIMI_CLASS}), not for "
        f"{settings.get('tokenizer_class') or kind!s:.60}. --tokenizer may give a folder with a tokenizer.json"
    )


def _special_tokens(settings: dict[str, Any], first: int) -> dict[int, AddedToken]:
    """Special tokens by their ids, which follow the file's."""
    named = settings.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    found = {}
    for number in range(first, first + RESERVED):
        given = named.get(str(number))
        given = given if isinstance(given, dict) and isinstance(given.get("content"), str) else {}
        content = given.get("content", f"<|reserved_token_{number}|>")
        found[number] = AddedToken(content, special=bool(given.get("special", True)), normalized=False)
    return found


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} without one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
