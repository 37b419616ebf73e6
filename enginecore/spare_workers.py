"""SpareWorkers: worker processes that load their modules, torch among them, before the generation that needs them is due.

Loading takes seconds, most of a small model's start, and needs no configuration: a spare uses no GPU, and waits for its
configuration for as long as it takes. Owned by WorkerGroup; WorkerSupervisor decides when there are spares.
"""

import logging
from collections.abc import Sequence

from quire.ipc.process.children import Child, prespawn

log = logging.getLogger("quire.enginecore")


class SpareWorkers:
    """children: spares that exist already."""

    def __init__(self, children: Sequence[Child] = ()) -> None:
        self._children = list(children)

    def __len__(self) -> int:
        return len(self._children)

    def add(self, module: str) -> bool:
        """Start one more. False if the machine has no room for it: then it is started when it is needed."""
        try:
            self._children.append(prespawn(module))
        except OSError as error:
            log.warning("no process for the next workers can be kept ready: %s", error)
            return False
        return True

    def take(self, module: str) -> Child:
        """A spare that is alive and not stopped, or a new process. Raises OSError."""
        while self._children:
            child = self._children.pop(0)
            if child.poll() is None and not child.is_stopped():
                return child
            log.warning(
                "a worker's process that was kept ready has ended, or was stopped (pid %d): another is started", child.pid
            )
            child.terminate(0.0)
        return prespawn(module)

    def close(self) -> None:
        """End all spares."""
        for child in self._children:
            child.terminate(0.0)
        self._children = []
