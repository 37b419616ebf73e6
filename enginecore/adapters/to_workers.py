"""ToWorkers: asks all ranks to load or forget an adapter, and collects their answers. Owned by Adapters.

Workers that die while they read an adapter into host memory are asked again, once they are replaced; but only MOST_DEATHS
times, as the adapter may be the cause. A load into a slot dies with its workers: their successors' slots are empty.
"""

from collections.abc import Callable

from quire.enginecore.adapters.registry import Adapter
from quire.enginecore.workers import WorkerGroup
from quire.ipc.messages.workers import ControlReply, ForgetAdapter, LoadAdapter

MOST_DEATHS = 2
FAILED = "the engine's workers failed while they read it"


class ToWorkers:
    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    @property
    def are_ready(self) -> bool:
        return self._workers.is_ready

    def load(
        self, adapter: Adapter, slot: int, done: Callable[[str], None], *, once: bool = False, num_deaths: int = 0
    ) -> None:
        """Ask, as soon as the workers are ready. done: called with the first error, which is empty if all ranks have it. once:
        it is not called if the workers die. Raises WorkersFailed."""
        if not self._workers.is_ready:
            self._workers.when_ready.append(lambda: self.load(adapter, slot, done, once=once, num_deaths=num_deaths))
            return
        replies: list[ControlReply] = []

        def on_reply(reply: ControlReply) -> None:
            replies.append(reply)
            if len(replies) < self._workers.world_size:
                return
            error = next((reply.error for reply in replies if reply.error), "")
            if not error or self._workers.is_ready:
                done(error)
            elif not once and num_deaths + 1 < MOST_DEATHS:
                self.load(adapter, slot, done, num_deaths=num_deaths + 1)
            elif not once:
                done(FAILED)

        self._workers.send_control(lambda number: LoadAdapter(number, adapter.number, slot, adapter.plan), on_reply)

    def forget(self, adapter: Adapter) -> None:
        """Let the ranks drop their copies. Raises WorkersFailed."""
        if self._workers.is_ready:
            self._workers.send_control(lambda number: ForgetAdapter(number, adapter.number), lambda reply: None)
