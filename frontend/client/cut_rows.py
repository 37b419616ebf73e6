"""Cutting a text's ids to a number of them, as transformers cuts."""

from quire.frontend.text.tokenizer import Tokenizer


def cut_row(tokenizer: Tokenizer, row: list[int], most: int, side: str | None, has_special: bool) -> list[int]:
    """The row cut to `most` ids, with the special tokens that the tokenizer puts around a text, as transformers cuts."""
    if len(row) <= most:
        return row
    before, after = tokenizer.around if has_special else (0, 0)
    if before + after >= most:
        return row[:most]
    inner, room = row[before : len(row) - after], most - before - after
    kept = inner[len(inner) - room :] if side == "left" else inner[:room]
    return [*row[:before], *kept, *row[len(row) - after :]]
