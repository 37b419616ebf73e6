"""EncodedSteps: of which steps with runs of the encoder the workers have told all that has failed.

Results come by shared memory, failures by sockets, and neither waits for the other. A step's results are not taken before each
rank with an encoder has sent ItemsEncoded, so no request ends well with what was computed from a failed run. Steps are taken
in order: one without runs that reads the rows is behind the one that made them. WorkerGroup feeds it, and core.py asks it.
"""

from collections import deque

from quire.enginecore.scheduling.step import ScheduledStep
from quire.ipc.messages.workers import ItemsEncoded
from quire.ipc.step.sections import STEP_MASK


class EncodedSteps:
    """num_ranks: with an encoder, those of the first stage. depth: of the result ring, steps that may be in flight at least."""

    def __init__(self, num_ranks: int, depth: int):
        self._num_ranks, self._depth = num_ranks, depth
        self._told: dict[int, deque[int]] = {}  # by rank: the last steps that it has told of

    def heard(self, message: ItemsEncoded) -> None:
        self._told.setdefault(message.rank, deque(maxlen=self._depth)).append(message.step)

    def has_all(self, step: ScheduledStep) -> bool:
        """Whether all failures of the runs of the oldest step in flight, which has some, are known."""
        return len(self._told) == self._num_ranks and all(step.step & STEP_MASK in told for told in self._told.values())

    def clear(self) -> None:
        """The workers are gone."""
        self._told.clear()
