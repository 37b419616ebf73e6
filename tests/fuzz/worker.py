"""The fuzzer's worker process: tries case after case of each target, and notes in shared memory which one it is trying.

`run.py` starts it, reads the note when it dies or hangs, and starts another one behind that case. A case is made from the seed,
the target's name and the case's number alone, so the same seed makes the same cases whatever happened before.
"""

import hashlib
import importlib
import logging
import mmap
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from fuzz.case import Case, Draw, Finding, Target

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
FOUND = ROOT / "build" / "fuzz"
NOTE_BYTES = 1 << 20
_NOTE = struct.Struct("<QI")  # the case's number + 1, and its length
_SHOWN_S = 5.0
_SHRINK_S = 4.0
_MOST_FINDINGS = 8  # of a target
_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"), "0")


class Note:
    """What the worker is trying, in a file that the parent reads."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOTE_BYTES)

    def write(self, number: int, data: bytes) -> None:
        data = data[: NOTE_BYTES - _NOTE.size]
        self._memory[_NOTE.size : _NOTE.size + len(data)] = data
        _NOTE.pack_into(self._memory, 0, number + 1, len(data))

    def read(self) -> tuple[int, bytes]:
        """The case's number, -1 before the first one and for kept ones; the case."""
        number, length = _NOTE.unpack_from(self._memory)
        return number - 1, self._memory[_NOTE.size : _NOTE.size + length]


class LastErrors(logging.Handler):
    """Keeps the exceptions that were logged, which the answer to a request does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


LOGGED = LastErrors()


def kept_cases(target: Target) -> dict[str, Case]:
    """The cases of the corpus, by name."""
    return {path.name: Case.decode(path.read_bytes()) for path in sorted((CORPUS / target.name).glob("*"))}


def made(target: Target, pool: Sequence[Case], seed: int, number: int) -> Case:
    """The case of this number."""
    draw = Draw(f"{seed} {target.name} {number}")
    return target.mutate(draw, draw.choice(pool), pool)


def tried(target: Target, case: Case) -> tuple[str, str] | None:
    """What is wrong, as a kind, by which findings are told apart, and a text; None if nothing is."""
    LOGGED.errors.clear()
    began = time.process_time()
    try:
        target.check(case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        causes = [*LOGGED.errors, error]
        frames = traceback.extract_tb(causes[0].__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        kind = f"{type(causes[0]).__name__} at {where}"
        if isinstance(causes[0], Finding):
            kind = f"{str(error)[:60].translate(_NO_DIGITS)}"
        return kind, "".join(line for cause in causes for line in traceback.format_exception(cause, limit=-12, chain=False))
    took = time.process_time() - began
    return (f"slow at {target.name}", f"it took {took:.1f} s of CPU time") if took > target.most_s else None


def shrunk(target: Target, case: Case, kind: str) -> Case:
    """A shorter case that shows the same, found in a few seconds by leaving parts out."""
    until, size = time.monotonic() + _SHRINK_S, max(1, len(case.payload) // 2)
    while size and time.monotonic() < until:
        at = 0
        while at < len(case.payload) and time.monotonic() < until:
            shorter = case._replace(payload=case.payload[:at] + case.payload[at + size :])
            same = tried(target, shorter)
            if same is not None and same[0] == kind:
                case = shorter
            else:
                at += size
        size //= 2
    return case


def keep(target: Target, case: Case) -> Path:
    """Write a finding's case to a file."""
    data = case.encode()
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def report(target: Target, case: Case, text: str, how: str) -> None:
    """Keep a finding, and print it with the command that tries it again."""
    path = keep(target, case).relative_to(ROOT)
    print(f"\n{target.name}: {how}\n{text.rstrip()}\ntry it again: make fuzz ARGS='--case {path}'", flush=True)


def try_kept(target: Target, note: Note) -> int:
    """Try the seeds and the corpus. Returns how many kinds of findings there were."""
    kinds: set[str] = set()
    for name, case in {**{f"seed {i}": case for i, case in enumerate(target.seeds())}, **kept_cases(target)}.items():
        note.write(-1, case.encode())
        if (wrong := tried(target, case)) is not None and wrong[0] not in kinds:
            kinds.add(wrong[0])
            report(target, case, wrong[1], f"{name}: {wrong[0]}")
    return len(kinds)


def try_new(target: Target, note: Note, seed: int, first: int, until: float) -> int:
    """Try new cases from the number `first` on, until the time. Returns the number of findings."""
    pool, kinds = [*target.seeds(), *kept_cases(target).values()], set[str]()
    number, shown = first, time.monotonic()
    while (now := time.monotonic()) < until and len(kinds) < _MOST_FINDINGS:
        case = made(target, pool, seed, number)
        note.write(number, case.encode())
        if (wrong := tried(target, case)) is not None and wrong[0] not in kinds:
            kinds.add(wrong[0])
            report(target, shrunk(target, case, wrong[0]), wrong[1], f"case {number} of seed {seed}: {wrong[0]}")
        number += 1
        if now - shown > _SHOWN_S:
            shown = now
            print(f"{target.name}: {number} cases, {len(kinds)} findings", flush=True)
    print(f"{target.name}: {number} cases, {len(kinds)} findings", flush=True)
    return len(kinds)


def target_of(name: str) -> Target:
    return importlib.import_module(f"fuzz.{name}").TARGET  # type: ignore[no-any-return]


def main(name: str, note_path: str, seed: str, first: str, seconds: str) -> int:
    until = time.monotonic() + float(seconds)
    logging.getLogger().addHandler(LOGGED)
    target, note = target_of(name), Note(note_path)
    found = try_kept(target, note) if first == "0" else 0
    return 1 if found + try_new(target, note, int(seed), int(first), until) else 0


def try_one(target: Target, case: Case) -> int:
    """Try a case from a file; prints what it shows."""
    logging.getLogger().addHandler(LOGGED)
    wrong = tried(target, case)
    print(f"{target.name}: {wrong[0]}\n{wrong[1]}" if wrong is not None else f"{target.name}: nothing is wrong")
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
