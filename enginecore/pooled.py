"""Messages of pooled rows: for each frontend one Pooled of all its results of a step, and errors for those that are no numbers.

It has no state; publish.py calls it with a step's side results.
"""

from collections.abc import Mapping

import numpy as np

from quire.enginecore.tasks.task import SideTarget
from quire.ipc.messages.frontend import CoreMessage, Pooled, RequestError
from quire.ipc.messages.workers import PooledRows
from quire.ipc.pooling import VECTOR

NOT_A_NUMBER = "the model's result is not a number for this prompt (NaN or infinity)"


def pooled_messages(result: PooledRows, targets: Mapping[int, SideTarget], epoch: int) -> list[tuple[int, CoreMessage]]:
    """(owner, message) of the rows that a request waits for; `targets`: their requests, by row."""
    rows = result.rows
    shapes = np.frombuffer(result.shapes, np.int32).reshape(-1, 2)
    data = np.frombuffer(result.data, np.float32)
    ends = np.cumsum(np.where(shapes[:, 0] == VECTOR, 1, shapes[:, 0]) * shapes[:, 1])
    parts = dict(zip(rows, zip(shapes.tolist(), np.split(data, ends[:-1]), strict=True), strict=True))
    if rows and targets.keys() >= set(rows) and len({targets[row].owner for row in rows}) == 1 and np.isfinite(data).all():
        columns = _columns(rows, shapes, targets)
        return [(targets[rows[0]].owner, Pooled(epoch, *columns, result.data))]  # nothing is copied
    by_owner: dict[int, list[int]] = {}
    for row in rows:
        if row in targets:
            by_owner.setdefault(targets[row].owner, []).append(row)
    messages: list[tuple[int, CoreMessage]] = []
    for owner, own in by_owner.items():
        failed = {targets[row].request_id for row in own if not np.isfinite(parts[row][1]).all()}
        messages += [(owner, RequestError(epoch, each, "engine_error", NOT_A_NUMBER)) for each in sorted(failed)]
        if good := [row for row in own if targets[row].request_id not in failed]:
            messages.append((owner, _pooled(good, parts, targets, epoch)))
    return messages


def _pooled(
    rows: list[int], parts: Mapping[int, tuple[list[int], np.ndarray]], targets: Mapping[int, SideTarget], epoch: int
) -> Pooled:
    columns = _columns(rows, np.array([parts[row][0] for row in rows], np.int32), targets)
    return Pooled(epoch, *columns, np.concatenate([parts[row][1] for row in rows]).data.cast("B"))


def _columns(rows: list[int], shapes: np.ndarray, targets: Mapping[int, SideTarget]) -> tuple[bytes, bytes, bytes]:
    """keys, shapes and cached of a Pooled. shapes: int32 [n, 2]."""
    mine = [targets[row] for row in rows]
    more = np.array([(target.start, target.is_last) for target in mine], np.int32)
    return (
        np.array([target.key for target in mine], np.int64).tobytes(),
        np.concatenate([shapes, more], 1).tobytes(),
        np.array([target.num_cached for target in mine], np.int32).tobytes(),
    )
