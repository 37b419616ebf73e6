"""SideResults on their way: a step's results beside its tokens are sent once the next step has been launched, if there is one.

Reading a result waits for the device. If it came first, the device would wait for the next launch. A step with masks
comes after the results: the core makes its masks of this step's tokens, and both would wait for each other.
"""

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.workers import SideResults
from quire.workers.outputs.output import RowResult


class SideResultSender:
    """sends: whether this is the output rank. Every rank has the results; only that one sends them."""

    def __init__(self, link: WorkerToCore, rank: int, sends: bool) -> None:
        self._link, self._rank, self._sends = link, rank, sends
        self._due: list[tuple[int, list[RowResult]]] = []

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, step: int, results: list[RowResult]) -> None:
        if self._sends and results:
            self._due.append((step, results))

    def send(self) -> None:
        """Send all, in order; waits for the device where it still computes them."""
        due, self._due = self._due, []
        for step, results in due:
            self._link.send(SideResults(self._rank, step, [result.message() for result in results]))
