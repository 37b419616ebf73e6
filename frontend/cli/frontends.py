"""The frontend processes of `quire serve --frontends N`: kept alive, and their shares of one port.

Each has a listening socket of its own at the shared port (SO_REUSEPORT), which its parent, the caller, holds as well. The
kernel distributes new connections over all listening sockets, even of dead processes. So the socket of a frontend that is down
is closed: connections in its queue are kept for its next process (MAX_KEPT at most), and others get new ones. Only while no
frontend is up do sockets stay open, and connections wait in them.
"""

import asyncio
import contextlib
import signal
import socket

import msgspec

from quire.frontend.http.listener import bind_beside
from quire.frontend.http.server import FrontendConfig, StopSignals
from quire.frontend.supervisor import StartFailed, Supervisor, in_daemon_thread, until_ended
from quire.ipc.process.children import Child, how_it_ended, spawn
from quire.ipc.process.restarts import Restarts

_START_TIMEOUT_S = 60.0
_END_S = 1.0  # from a process's last message, or its closed socket, to its end
HUNG_AFTER_S = 30.0  # after as long a silence an engine aborts a frontend's requests
_LAST_WORDS_S = 5.0  # beyond the grace for requests
MAX_KEPT = 256  # connections kept for one frontend's next process: they use descriptors, and a start needs some


class Frontends:
    """All frontend processes. `template`: their common configuration; they own the sockets from now on."""

    def __init__(self, template: FrontendConfig, sockets: list[socket.socket], logs_engine_changes: bool) -> None:
        self._grace_s = template.drain_delay_s + template.shutdown_grace_s + _LAST_WORDS_S
        self._all = [
            Frontend(self, msgspec.structs.replace(template, index=i, logs_engine_changes=i == 0 and logs_engine_changes), sock)
            for i, sock in enumerate(sockets)
        ]

    async def start(self) -> str:
        """The served model's name, when all are ready. Raises StartFailed."""
        await asyncio.gather(*(frontend.start_again() for frontend in self._all))
        return self._all[0].model

    async def keep_alive(self, signals: StopSignals) -> None:
        """Keep all alive until signals.stop. No frontend is given up: one that finds no engine may find it later."""
        async with asyncio.TaskGroup() as keepers:
            tasks = [keepers.create_task(_supervisor(frontend).keep_alive()) for frontend in self._all]
            await signals.stop.wait()
            for task in tasks:
                task.cancel()

    async def stop(self, signals: StopSignals) -> None:
        """End all frontends, at once if signals.now is set; else with time to answer running requests."""
        children = [frontend.child for frontend in self._all if frontend.has_child]
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

    def share_port(self) -> None:
        """Called when a frontend has come up or gone down: if any is up, those that are down stop listening."""
        if any(frontend.is_up for frontend in self._all):
            for frontend in self._all:
                if frontend.is_down:
                    frontend.stop_listening()


def _supervisor(frontend: "Frontend") -> Supervisor:
    return Supervisor(frontend, Restarts(max_failed_starts=None, max_short_lives=None), HUNG_AFTER_S)


class Frontend:
    """One frontend process, its socket, and the connections that wait for it. It is up, or down, or starting."""

    def __init__(self, frontends: Frontends, config: FrontendConfig, sock: socket.socket) -> None:
        self.name = f"frontend process {config.index}"
        self.while_down = "others take its connections"
        self.model = ""
        self.is_up = self.is_down = False
        self._frontends = frontends
        self._config = config
        self._family, self._address = sock.family, sock.getsockname()
        self._socket: socket.socket | None = sock
        self._waiting: list[socket.socket] = []  # accepted while it was down
        self._child: Child | None = None

    @property
    def has_child(self) -> bool:
        return self._child is not None

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    async def start_again(self) -> None:
        """Start the process, also the first time; returns when it serves. Raises StartFailed."""
        child = self._child = self._spawn()
        said = await in_daemon_thread(lambda: child.receive(_START_TIMEOUT_S)) or {}
        if "ready" not in said:
            is_late = await in_daemon_thread(lambda: child.wait(_END_S)) is None  # an ending process closes its link
            how = how_it_ended(await in_daemon_thread(lambda: child.terminate(0.0)))
            why = f"was not ready within {_START_TIMEOUT_S:g} s" if is_late else f"ended while it started ({how})"
            raise StartFailed(said.get("error", f"a frontend process {why}"))
        self.model, self.is_up = said["ready"], True
        for connection in self._waiting:  # the process has them now
            connection.close()
        self._waiting.clear()
        self._frontends.share_port()

    def _spawn(self) -> Child:
        accepted = [connection.fileno() for connection in self._waiting]
        try:
            self._socket = self._socket or bind_beside(self._family, self._address)
            config = msgspec.structs.replace(self._config, listen_fd=self._socket.fileno(), accepted_fds=accepted)
            child = spawn("quire.frontend.http", config, [config.listen_fd, config.metrics_fd, *accepted])
        except OSError as error:  # no process, descriptor or port is available now
            raise StartFailed(str(error)) from None
        self.is_down = False
        return child

    def on_down(self) -> None:
        self.is_up, self.is_down = False, True
        self._frontends.share_port()

    def let_go(self) -> None:
        """Close our copy of the socket; it listens as long as its process does."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def stop_listening(self) -> None:
        """Leave new connections to other frontends, and keep those in the queue, which closing the socket would reset. A unix
        socket is shared by all, with one queue."""
        if self._socket is None or self._family == socket.AF_UNIX:
            return
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # BlockingIOError: the queue is empty
            while len(self._waiting) < MAX_KEPT:
                self._waiting.append(self._socket.accept()[0])
        self._socket.close()
        self._socket = None
