"""Token ids to text as they come: incremental decoding, stop strings, and both together for one sequence.

`IncrementalDetokenizer` returns each push's new text, never half a character. All its text together is the text of prompt and
output decoded at once, without the prompt's text (so the space between prompt and output is kept, as in vLLM). `StopChecker`
finds the stop string that is complete first, and holds back only text that may still become one. `OutputText` combines both;
the client has one for each sequence. With local pieces (token_bytes.py), a push costs a table look-up and a UTF-8 decode, O(1)
a token; other tokenizers decode a short window of tokens again. `tokenizers.decoders.DecodeStream` is as fast (0.5 us a token)
but raises on one in seven random sequences with byte fallback, and holds invalid bytes back for ever, at growing cost (195 us a
token over 2,000 of them).

One difference from `tokenizers` is deliberate: with byte fallback, a run of byte tokens that ends in an incomplete character
keeps its complete characters, where `tokenizers` replaces every byte of the run. Streamed text cannot be taken back.
"""

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import tokenizers

from quire.frontend.text.token_bytes import Pieces
from quire.ipc.sampling import SamplingParams

PROMPT_TAIL = 16  # most prompt tokens that a detokenizer gets: enough to know the text before the output
MAX_WINDOW = 16  # after so many tokens without a complete character, a window is treated as not UTF-8

REPLACEMENT = "\ufffd"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("quire.each_byte", _replace_each_byte)


class Vocabulary(Protocol):
    """The parts of a Tokenizer (tokenizer.py) that decoding uses."""

    backend: tokenizers.Tokenizer
    pieces: Pieces
    added_ids: frozenset[int]
    special_ids: frozenset[int]


class TextParams(Protocol):
    """The fields of SamplingParams that affect decoding."""

    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def spaces_between_special_tokens(self) -> bool: ...
    @property
    def structured_outputs(self) -> object: ...


class IncrementalDetokenizer:
    """Makes one sequence's text of its token ids. `prompt_tail_ids`: the last few ids of the prompt."""

    def __init__(self, tokenizer: Vocabulary, params: TextParams, prompt_tail_ids: Sequence[int] = ()) -> None:
        pieces = tokenizer.pieces
        self._first = pieces.first
        self._table = pieces.visible if params.skip_special_tokens else pieces.all
        self._errors = "quire.each_byte" if pieces.byte_fallback else "replace"
        self._pending = b""  # bytes of an incomplete character
        self._at_start = pieces.first_differs  # no visible text so far
        # Only for decoders that join words with spaces: requests may want adjacent added tokens without a space between them.
        keep_apart = params.skip_special_tokens or params.spaces_between_special_tokens or not pieces.joined
        self._added = frozenset() if keep_apart else tokenizer.added_ids
        self._last_added = False
        self._leaves_out = params.structured_outputs is not None  # so that an output that ends early is a valid prefix
        self._window = None if pieces.local else _Window(tokenizer, params.skip_special_tokens)
        self._marks: Mapping[int, str] = {}
        self._from_prompt = False  # whether _pending comes from the prompt
        if prompt_tail_ids:
            self.push(prompt_tail_ids)
            self._from_prompt = bool(self._pending)

    def show(self, tokenizer: Vocabulary, special_ids: frozenset[int]) -> None:
        """From now on include these special tokens in the text, even with skip_special_tokens."""
        if self._window is not None:
            self._window.show(special_ids)
        elif self._table is tokenizer.pieces.visible:
            self._table = tokenizer.pieces.visible_with(special_ids)

    def mark(self, marks: Mapping[int, str]) -> None:
        """From now on these tokens become these texts, whatever they are in the vocabulary."""
        self._marks = marks

    def push(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """The text that these tokens complete. With `finished`, bytes of an incomplete character become U+FFFD; in structured
        output they are left out."""
        if self._marks and not self._marks.keys().isdisjoint(token_ids):
            return self._marked(token_ids, finished)
        cut = finished and self._leaves_out
        if self._window is not None:
            text = self._window.push(token_ids, finished)
            return text.rstrip(REPLACEMENT) if cut else text
        if self._at_start or self._added or self._from_prompt:
            data = self._careful(token_ids)
        else:
            table = self._table
            data = self._pending + b"".join([table[i] for i in token_ids])
        text, used = codecs.utf_8_decode(data, self._errors, finished and not cut)
        self._pending = data[used:]
        return text

    def _marked(self, token_ids: Sequence[int], finished: bool) -> str:
        """As `push`. A mark ends the character before it, complete or not."""
        parts, start = [], 0
        marks, self._marks = self._marks, {}
        for i, token_id in enumerate(token_ids):
            if token_id in marks:
                parts += [self.push(token_ids[start:i], True), marks[token_id]]
                self._pending, start = b"", i + 1
        parts.append(self.push(token_ids[start:], finished))
        self._marks = marks
        return "".join(parts)

    def _careful(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of these tokens, where a piece depends on its place at the start or on its neighbour."""
        parts = []
        for i in token_ids:
            piece = self._table[i]
            if piece and self._at_start:
                piece, self._at_start = self._first(i), False
            elif i in self._added and self._last_added:
                piece = self._first(i)
            self._last_added = i in self._added
            if piece and self._from_prompt:
                self._from_prompt = False
                if piece[0] & 0xC0 != 0x80:  # does not continue the prompt's character: drop that
                    self._pending = b""
            parts.append(piece)
        return self._pending + b"".join(parts)


class _Window:
    """Incremental decoding for any decoder: decodes the last few tokens with and without the new ones."""

    def __init__(self, tokenizer: Vocabulary, skip_special_tokens: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._skip = skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._ids: list[int] = []  # [0, read) became text already   [read, end) waits for a complete character
        self._read = 0

    def show(self, special_ids: frozenset[int]) -> None:
        self._hidden -= special_ids
        self._skip = False  # `push` removes those that are still hidden

    def push(self, token_ids: Sequence[int], finished: bool) -> str:
        new = [i for i in token_ids if i not in self._hidden]
        self._ids += new
        waiting = len(self._ids) - self._read
        if not waiting or (not new and not finished):
            return ""
        before = self._decode(self._ids[: self._read], skip_special_tokens=self._skip)
        text = self._decode(self._ids, skip_special_tokens=self._skip)
        if text.endswith(REPLACEMENT) and not finished and waiting < MAX_WINDOW:
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]


class StopChecker:
    """Finds the first of several stop strings in a text that comes in parts.

    The match that is complete first wins; if several end together, the longest. The result does not depend on how the text is
    cut into parts. `feed` returns text that cannot be part of a stop string; the possible beginning of one waits for `flush`.
    Cost: one search of the new text for a first character of a stop string, and one step for each character and string while
    one matches (Knuth, Morris and Pratt: no stop string makes it slower).
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False) -> None:
        self._stop = list(stop)
        self._include = include_in_output
        self._failure = [_failure_table(s) for s in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each string that the text ends with
        self._firsts = {s[0] for s in self._stop}
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, armed: bool = True) -> str:
        """Text that cannot be part of a stop string; with a match, text up to it, or through it. armed: False never matches."""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        end = self._scan(text, armed)
        known = self._held + (text if end is None else text[:end])
        if end is None:
            keep = max(self._matched)
        else:
            assert self.found is not None
            keep = 0 if self._include else len(self.found)
        shown, self._held = (known[:-keep], known[-keep:]) if keep else (known, "")
        if end is not None:
            self._held = ""
        return shown

    def flush(self) -> str:
        """The text that was held back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str, armed: bool) -> int | None:
        """Advance over `text`. If a stop string is complete, set `found` and return the index after it."""
        best: int | None = None
        for n, (stop, failure) in enumerate(zip(self._stop, self._failure, strict=True)):
            matched = self._matched[n]
            for at, char in enumerate(text):
                while matched and stop[matched] != char:
                    matched = failure[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched < len(stop):
                    continue
                if armed:
                    if best is None or at + 1 < best or (at + 1 == best and len(stop) > len(self.found or "")):
                        best, self.found = at + 1, stop
                    break
                matched = failure[matched - 1]
            self._matched[n] = matched
        return best


@lru_cache(maxsize=1024)  # a request's sequences share the strings; 64 of 1,024 characters take 10 ms
def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table, matched = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[i]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[i]:
            matched += 1
        table[i] = matched
    return table


class OutputText:
    """Text of one sequence, with stop strings.

    stop_string: the one that ended it. kept_tokens: tokens that belong to the output, up to and including the one that
    completed the stop string (all so far without one). A stop token's own text is left out unless include_stop_str_in_output;
    stop strings within the first min_tokens tokens do not count.
    """

    def __init__(self, tokenizer: Vocabulary, params: SamplingParams, prompt_tail_ids: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_tail_ids)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.stop_string: str | None = None
        self.kept_tokens = 0
        self._tokenizer = tokenizer

    def show(self, special_ids: frozenset[int]) -> None:
        """Include these special tokens in the text, for a parser. To be called before any token."""
        self._detokenizer.show(self._tokenizer, special_ids)

    def mark(self, marks: Mapping[int, str]) -> None:
        """Show these tokens as these texts, for a parser. To be called before any token."""
        self._detokenizer.mark(marks)

    def push(self, token_ids: Sequence[int], finished: bool = False, stop_token: bool = False) -> str:
        """New text. finished: these are the sequence's last tokens; stop_token: the last one ended it."""
        if self._checker is None and not stop_token:
            self.kept_tokens += len(token_ids)
            return self._detokenizer.push(token_ids, finished)
        if stop_token and not self._include:
            text = self._push(token_ids[:-1], finished)
            self.kept_tokens += self.stop_string is None
            return text
        return self._push(token_ids, finished)

    def _push(self, token_ids: Sequence[int], finished: bool) -> str:
        if self._checker is None:
            self.kept_tokens += len(token_ids)
            return self._detokenizer.push(token_ids, finished)
        parts = []
        for token_id in token_ids:
            self.kept_tokens += 1
            parts.append(self._feed(self._detokenizer.push((token_id,))))
            if self.stop_string is not None:
                return "".join(parts)
        if finished:
            parts.append(self._feed(self._detokenizer.push((), True)))
            parts.append(self._checker.flush())
        return "".join(parts)

    def _feed(self, text: str) -> str:
        assert self._checker is not None
        shown = self._checker.feed(text, self.kept_tokens > self._min_tokens)
        self.stop_string = self._checker.found
        return shown
