"""StructuredOutputs: what an output must be, as a kind of grammar and its text. Made by frontends, compiled by the core."""

from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 << 10  # of the text, in UTF-8
MAX_GRAMMAR_DEPTH = 64  # of brackets within brackets

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutputs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """kind and text: json, a JSON Schema; json_object, any JSON object (no text); regex; choice, a JSON list of texts; grammar,
    in Lark or EBNF; structural_tag, JSON as vLLM's. Raises ValueError for a text that is too long."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_BYTES or len(self.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"structured_outputs may be at most {MAX_GRAMMAR_BYTES >> 10} KiB long")
