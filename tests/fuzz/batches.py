"""Target: lines of batch files, the input of a batch, and the answers that `quire run-batch` takes up.

A line is a request, or an error with a code and a text; nothing else comes of a file, and what is answered is JSON in one
line.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fuzz.case import Case, Draw, Target, must
from fuzz.mutate import json_bytes, mutated_bytes, mutated_json

from quire.frontend.cli.answers_file import AnswersFile, BatchFileError
from quire.frontend.http.batches.input_file import InputFile
from quire.frontend.http.batches.lines import ENDPOINTS, BadLine, Line, answer_line, error_line

_HI = {"messages": [{"role": "user", "content": "hi ✓"}], "max_tokens": 5, "stream": None}
LINES = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": _HI} for i, url in enumerate(ENDPOINTS)]
_WORDS = [b"\n", b"\r\n", b"\xef\xbb\xbf", b"\x00", b'"stream": true', b'"custom_id": "r1"', b"{}", b"null", b" " * 50, b"\n\n"]


def seeds() -> Sequence[Case]:
    lines = [json.dumps(line).encode() for line in LINES]
    answers = [answer_line("r0", "batch_req_1", 200, b'{"a": 1}'), error_line("r1", "c", "m", 3), error_line(None, "c", "m", 4)]
    return [
        *(Case({"kind": "line"}, line) for line in lines),
        Case({"kind": "input"}, b"\n".join([*lines, b"", lines[0]])),
        Case({"kind": "input"}, b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n"),
        Case({"kind": "answers"}, b"\n".join(answers) + b"\n"),
        Case({"kind": "answers"}, answers[0] + b"\n" + answers[1][:20]),
    ]


def mutate(draw: Draw, case: Case, others: Sequence[Case]) -> Case:
    lines = case.payload.split(b"\n")
    at = draw.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        value = None
    if value is None or draw.random() < 0.3:
        return Case(case.head, mutated_bytes(draw, case.payload, _WORDS))
    lines[at] = json_bytes(draw, mutated_json(draw, value, LINES, ["stream", "background", "custom_id", "line"]))
    return Case(case.head, b"\n".join(lines)[: 200 << 10])


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        path = Path(folder) / "file"
        path.write_bytes(case.payload)
        if case.head["kind"] == "answers":
            _check_answers(path, case.payload)
        else:
            _check_input(path)


def _check_input(path: Path) -> None:
    file, seen = InputFile(os.open(path, os.O_RDONLY), 1000), set[str]()
    try:
        for number, line in file.check():
            if isinstance(line, Line):
                must(line.url in ENDPOINTS and line.custom_id and line.custom_id not in seen, "a line that is none:", line)
                seen.add(line.custom_id)
                answer = answer_line(line.custom_id, "batch_req_1", 200, line.body)
            else:
                must(isinstance(line, BadLine) and line.code and line.message.strip(), "an error without a text:", line)
                answer = error_line(line.custom_id, line.code, line.message, number)
            must(b"\n" not in answer, "an answer that is no line:", answer)
    finally:
        file.close()


def _check_answers(path: Path, before: bytes) -> None:
    try:
        answers = AnswersFile(str(path))
    except BatchFileError as error:
        must(str(error).strip() and path.read_bytes() == before, "a file that is refused was changed")
        return
    answers.write(error_line("new", "c", "m"))
    answers.close()
    after = path.read_bytes()
    must(before.startswith(after.rpartition(b"\n{")[0].rstrip(b"\n")), "a file was changed in its middle:", after)
    again = AnswersFile(str(path))
    must("new" in again.answered, "an answer that was written is not found again")
    again.close()


TARGET = Target("batches", seeds, mutate, check)
