"""The frontend processes of `quire serve --frontends N`: kept alive, replaced one by one, and their shares of one port.

Each has a listening socket of its own at the shared port (SO_REUSEPORT), which its parent, the caller, holds as well. The
kernel distributes new connections over all listening sockets, even of dead processes. So while a frontend is down, another one
that is up serves its socket too, with the connections that wait in its queue, until the next process takes the socket back:
none is reset. Only while no frontend is up do connections wait.

A frontend that was told to stop says when it takes no connections any more. From then on it *leaves*: it answers its last
requests, and its successor starts at once. `reload` replaces every frontend this way, with the successor first.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time

import msgspec

from quire.frontend.http.server import FrontendConfig, StopSignals
from quire.frontend.supervisor import StartFailed, Supervisor, in_daemon_thread, until_ended, watch_until_ended
from quire.ipc.process.children import Child, how_it_ended, spawn, was_killed
from quire.ipc.process.restarts import Restarts
from quire.ipc.process.stopped import StoppedFor

log = logging.getLogger("quire.serve")

_START_TIMEOUT_S = 60.0
_END_S = 0.05  # at once for a process that has ended; one that is ending has closed its link, and is looked at again
_LOOK_S = 0.5  # between looks at a process that starts
_STOPPED = "was stopped by a signal while it started"
HUNG_AFTER_S = 8.0
_LAST_WORDS_S = 5.0  # beyond the grace for requests
PANELS_EACH = 4  # for the metrics of each frontend's process and of those that leave
_PANEL_AGAIN_S = 1.0


class Frontends:
    """All frontend processes. `template`: their common configuration, with metrics_fd for PANELS_EACH panels each; they own
    the sockets from now on."""

    def __init__(self, template: FrontendConfig, sockets: list[socket.socket], logs_engine_changes: bool) -> None:
        self._grace_s = template.drain_delay_s + template.shutdown_grace_s + _LAST_WORDS_S
        self.template = template
        self._panels: dict[int, Child] = {}  # the process that counts in a panel, or did
        self._leaving: dict[Child, asyncio.Task[None]] = {}  # oldest first
        self._all = [Frontend(self, i, sock, i == 0 and logs_engine_changes) for i, sock in enumerate(sockets)]

    async def start(self) -> str:
        """The served model's name, when all are ready. Raises StartFailed."""
        await asyncio.gather(*(frontend.start_again() for frontend in self._all))
        return self._all[0].model

    @property
    def tasks(self) -> list[str]:
        """The abilities of the served model."""
        return self._all[0].tasks

    async def keep_alive(self, signals: StopSignals) -> None:
        """Keep all alive until signals.stop. No frontend is given up: one that finds no engine may find it later."""
        async with asyncio.TaskGroup() as keepers:
            tasks = [keepers.create_task(_supervisor(frontend).keep_alive()) for frontend in self._all]
            await signals.stop.wait()
            for task in tasks:
                task.cancel()

    async def reload(self, template: FrontendConfig) -> None:
        """Replace the frontends one by one by processes with this configuration; the former ones answer their last requests.
        One that cannot be replaced goes on as it is, which is logged."""
        self.template = template
        for frontend in self._all:
            try:
                await frontend.renew()
            except StartFailed as error:
                log.error("%s was not replaced, and goes on with what it read before: %s", frontend.name, error)

    async def stop(self, signals: StopSignals) -> None:
        """End all frontends, at once if signals.now is set; else with time to answer running requests."""
        children = [child for frontend in self._all for child in frontend.children] + list(self._leaving)
        for leaving in self._leaving.values():
            leaving.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        for child in children:
            child.send_signal(signal.SIGTERM)
        for frontend in self._all:
            frontend.let_go()
        forced = asyncio.create_task(signals.now.wait())
        ended = asyncio.gather(*map(until_ended, children))
        await asyncio.wait((ended, forced), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, forced):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ended
        for child in children:
            child.terminate(0.0)

    # ------------------------------------------------------------------------------------------ called by the frontends
    def share_port(self) -> None:
        """Called when a process has come up or gone: sockets of frontends that are down are served by others."""
        up = [frontend for frontend in self._all if frontend.is_up]
        for number, frontend in enumerate(self._all):
            frontend.served_by([] if frontend.is_up else [each.child for each in up[number % len(up) :] + up] if up else [])

    def let_leave(self, child: Child) -> None:
        """Wait for the end of a process that takes no connections any more; it must go on sending heartbeats."""
        if child not in self._leaving:
            self._leaving[child] = asyncio.create_task(self._until_gone(child))

    async def _until_gone(self, child: Child) -> None:
        if why := await watch_until_ended(child, HUNG_AFTER_S):
            log.error("a frontend process that was ending %s", why.removeprefix("it "))
        child.close()
        del self._leaving[child]

    def panel(self, number: int) -> int:
        """A free panel for the metrics of a new process, if possible of this number. Raises StartFailed."""
        free = [n for n in range(PANELS_EACH * len(self._all)) if n not in self._panels or self._panels[n].poll() is not None]
        if not free:
            oldest = next(iter(self._leaving), None)
            if oldest is not None:
                oldest.send_signal(signal.SIGTERM)  # it has --shutdown-grace-s, or until it is asked again
            raise StartFailed("too many former frontend processes still answer their last requests")
        return number if number in free else free[0]

    def takes_panel(self, panel: int, child: Child) -> None:
        self._panels[panel] = child


def _supervisor(frontend: "Frontend") -> Supervisor:
    return Supervisor(frontend, Restarts(max_failed_starts=None, max_short_lives=None), HUNG_AFTER_S)


def _first_words(child: Child) -> tuple[dict[str, str], str]:
    """The first message of a process that starts, and why it is late: "" if it has said something or has ended."""
    deadline, stopped_for = time.monotonic() + _START_TIMEOUT_S, StoppedFor()
    while (left_s := deadline - time.monotonic()) > 0:
        if (said := child.receive(min(left_s, _LOOK_S))) is not None:
            return said, ""
        if child.wait(_END_S) is not None:
            return child.receive(0.0) or {}, ""
        if stopped_for.seconds(child.is_stopped()) > HUNG_AFTER_S:
            return {}, _STOPPED
    return {}, f"was not ready within {_START_TIMEOUT_S:g} s"


class Frontend:
    """One frontend: its socket, and its process, which is up, or down, or starting, and is replaced now and then."""

    def __init__(self, frontends: Frontends, number: int, sock: socket.socket, logs_engine_changes: bool) -> None:
        self.name = f"frontend process {number}"
        self.while_down = "others take its connections"
        self.model, self.tasks = "", list[str]()
        self.is_up = False
        self._frontends = frontends
        self._number = number
        self._logs_engine_changes = logs_engine_changes
        self._socket: socket.socket | None = sock
        self._served_by: Child | None = None  # another frontend's process, while ours is down
        self._child: Child | None = None
        self._starting: Child | None = None
        self._template: FrontendConfig | None = None  # of the process
        self._lock = asyncio.Lock()  # one start at a time

    @property
    def children(self) -> list[Child]:
        """Its processes, but for those that leave."""
        return [child for child in (self._child, self._starting) if child is not None]

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    async def start_again(self) -> None:
        """Start the process, also the first time; returns when it serves. Raises StartFailed."""
        async with self._lock:
            self._child = await self._started()
            self.is_up = True
        self._frontends.share_port()

    async def renew(self) -> None:
        """Replace a process that has an earlier configuration: the new one serves before the old one stops. Raises
        StartFailed."""
        async with self._lock:
            if not self.is_up or self._template is self._frontends.template:
                return  # the next start has the present configuration
            former = self.child
            for _ in range(int(_LAST_WORDS_S / _PANEL_AGAIN_S)):
                with contextlib.suppress(StartFailed):
                    self._frontends.panel(self._number)
                    break
                await asyncio.sleep(_PANEL_AGAIN_S)  # for one that has been told to end now
            self._child = await self._started()
        self._frontends.share_port()
        former.tell({"retire": "now"})
        log.info("%s was replaced", self.name)

    async def _started(self) -> Child:
        """A new process, when it serves. Raises StartFailed."""
        child = self._starting = self._spawn()  # kept if this is cancelled: `stop` ends it
        said, late = await in_daemon_thread(lambda: _first_words(child))
        self._starting = None
        if "ready" not in said:
            code = await in_daemon_thread(lambda: child.terminate(0.0))
            how = late or f"ended while it started ({how_it_ended(code)})"
            raise StartFailed(
                said.get("error", f"a frontend process {how}"), late == _STOPPED or (not late and was_killed(code))
            )
        self.model, self.tasks = said["ready"], said.get("tasks", "generate").split()
        return child

    def _spawn(self) -> Child:
        assert self._socket is not None
        panel, template = self._frontends.panel(self._number), self._frontends.template
        try:
            config = msgspec.structs.replace(
                template, index=panel, listen_fd=self._socket.fileno(), logs_engine_changes=self._logs_engine_changes
            )
            child = spawn("quire.frontend.http", config, [config.listen_fd, config.metrics_fd])
        except OSError as error:  # no process or descriptor is available now
            raise StartFailed(str(error)) from None
        self._template = template
        self._frontends.takes_panel(panel, child)
        return child

    def on_message(self, child: Child, said: dict[str, str]) -> bool:
        if "draining" not in said:
            return False
        self._frontends.let_leave(child)
        return True

    def on_down(self) -> None:
        self.is_up = False
        self._frontends.share_port()

    def let_go(self) -> None:
        """Close our copy of the socket; it listens as long as its process does."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def served_by(self, others: list[Child]) -> None:
        """Let one of these processes serve our socket, or none. A unix socket is shared by all, with one queue."""
        if self._socket is None or self._socket.family == socket.AF_UNIX:
            return
        before = self._served_by
        if before in others and before is not None:
            return
        self._served_by = others[0] if others else None
        if before is not None:
            before.tell({"release": str(self._number)})
        if self._served_by is not None:
            self._served_by.tell({"adopt": str(self._number)}, [self._socket.fileno()])
