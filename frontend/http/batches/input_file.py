"""InputFile: a batch's input on the disk: where its lines are, and their errors. It is read in threads, a line at a time.

Only offsets are kept in memory, not bodies: a file may have 200 MiB. All calls block.
"""

import os
from collections.abc import Iterator

from quire.frontend.http.batches.lines import MAX_LINE_BYTES, BadLine, Line, parse_line

_PIECE = 1 << 20


class InputFile:
    """fd: closed by `close`. Lines are numbered from 1; blank lines are skipped, but counted."""

    def __init__(self, fd: int, max_lines: int | None = None) -> None:
        """max_lines: how many lines to index, blank ones included; `has_more` is set if the file has more."""
        self._fd = fd
        self._places: dict[int, tuple[int, int]] = {}  # line -> offset, size
        self.has_more = False
        self._index(max_lines)

    def _index(self, max_lines: int | None) -> None:
        begin = 0
        for number, end in enumerate(self._line_ends(), 1):
            if max_lines is not None and number > max_lines:
                self.has_more = True
                return
            if end - begin > MAX_LINE_BYTES or os.pread(self._fd, end - begin, begin).strip(b"\xef\xbb\xbf \t\r\n"):
                self._places[number] = begin, end - begin
            begin = end + 1

    def _line_ends(self) -> Iterator[int]:
        """Offsets of newlines, and of the end of a last line without one."""
        offset, last = 0, -1
        while piece := os.pread(self._fd, _PIECE, offset):
            at = piece.find(b"\n")
            while at >= 0:
                last = offset + at
                yield last
                at = piece.find(b"\n", at + 1)
            offset += len(piece)
        if offset > last + 1:
            yield offset

    @property
    def numbers(self) -> list[int]:
        """Numbers of the lines that are not blank."""
        return list(self._places)

    def read(self, number: int) -> Line:
        """Raises BadLine."""
        offset, size = self._places[number]
        if size > MAX_LINE_BYTES:
            raise BadLine("line_too_long", f"a line may be at most {MAX_LINE_BYTES} bytes long")
        return parse_line(os.pread(self._fd, size, offset).removeprefix(b"\xef\xbb\xbf"))

    def check(self) -> Iterator[tuple[int, Line | BadLine]]:
        """Yield every line or its error; a custom_id that an earlier line has is an error, too."""
        first: dict[str, int] = {}
        for number in self._places:
            try:
                line = self.read(number)
            except BadLine as error:
                yield number, error
                continue
            earlier = first.setdefault(line.custom_id, number)
            if earlier == number:
                yield number, line
            else:
                text = f"custom_id is line {earlier}'s already"
                yield number, BadLine("duplicate_custom_id", text, "custom_id", line.custom_id)

    def close(self) -> None:
        os.close(self._fd)
