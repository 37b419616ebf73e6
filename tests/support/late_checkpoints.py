"""A fault for tests of recurrent states: a checkpoint holds a state of some tokens later than its place."""

from typing import Any


def keep_late(states: Any, by: int) -> None:
    """From now on chunks that leave a checkpoint end up to `by` tokens after it. states: of a KVManager."""
    cut, begin_chunk, late = states.cut, states.begin_chunk, 0

    def longer(held: Any, start: int, length: int, total: int) -> int:
        nonlocal late
        found = cut(held, start, length, total)
        late = min(by, length - found, total - 1 - start - found) if start + found in held.states.places else 0
        return found + late

    def as_if_shorter(held: Any, start: int, end: int) -> tuple[int, int]:
        return begin_chunk(held, start, end - late)

    states.cut, states.begin_chunk = longer, as_if_shorter
