"""Case: one input of a fuzzing target, as a file of the corpus has it. Target: what makes cases of others and tries them.

A file is one line of JSON, which says how the payload is to be used, and then the payload: any bytes. `run.py` and `worker.py`
know targets by this file alone; `targets.py` lists them.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Draw = random.Random


class Case(NamedTuple):
    """head: JSON. payload: any bytes."""

    head: dict[str, Any]
    payload: bytes

    def encode(self) -> bytes:
        return json.dumps(self.head).encode() + b"\n" + self.payload

    @classmethod
    def decode(cls, data: bytes) -> "Case":
        head, _, payload = data.partition(b"\n")
        return cls(json.loads(head), payload)


class Finding(AssertionError):
    """What a target found: the text says what was expected."""


class Target(NamedTuple):
    """A part of the project under test.

    seeds: cases that are right, or nearly so, besides those of the corpus. mutate: a new case from one of them; it may take
    parts of others. check: tries a case, and raises Finding, or lets any exception through that the part must not raise.
    most_s: CPU seconds that a case may take.
    """

    name: str
    seeds: Callable[[], Sequence[Case]]
    mutate: Callable[[Draw, Case, Sequence[Case]], Case]
    check: Callable[[Case], None]
    most_s: float = 5.0


def must(condition: object, *said: object) -> None:
    """Raises Finding if the condition does not hold."""
    if not condition:
        raise Finding(" ".join(str(part)[:600] for part in said))
