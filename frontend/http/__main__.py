"""A frontend process, a child of `quire serve --frontends N`: it reads its configuration and reports readiness or an error.

To its parent it says when it has served a request, and when it takes no connections any more; by its parent it is lent sockets
of frontends that are down, and told when another process has taken its place.
"""

import asyncio
import os
import signal
import socket
import sys

from quire.frontend.client.client import Client
from quire.frontend.http.api.access import Access
from quire.frontend.http.limits.key_limits import CurrentLimits
from quire.frontend.http.listener import FrontendError
from quire.frontend.http.listeners import Listeners
from quire.frontend.http.server import FrontendConfig, Owner, StopSignals, run, serve
from quire.ipc.process.children import child_main_config, heartbeat, on_parent_message, tell_parent
from quire.ipc.process.logs import set_up_logging

HEARTBEAT_S = 0.5


class Launcher(Owner):
    """The parent process."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self._tasks = set[asyncio.Task[None]]()

    def began(self, access: Access, listeners: Listeners, key_limits: CurrentLimits) -> None:
        loop = asyncio.get_running_loop()

        def take(said: dict[str, str], fds: list[int]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take, listeners, said, fds)

        on_parent_message(take)

    def _take(self, listeners: Listeners, said: dict[str, str], fds: list[int]) -> None:
        if "retire" in said:
            self._signals.retire()
        if "release" in said:
            listeners.release(said["release"])
        if "adopt" in said and fds:
            task = asyncio.create_task(listeners.adopt(said["adopt"], socket.socket(fileno=fds.pop(0))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for fd in fds:
            os.close(fd)

    def ready(self, client: Client) -> None:
        welcome = client.welcome
        tell_parent({"ready": welcome.served_model_names[0], "tasks": " ".join(welcome.limits.tasks)})

    def served(self) -> None:
        tell_parent({"served": "yes"})

    def draining(self) -> None:
        tell_parent({"draining": "yes"})


def main() -> None:
    config = child_main_config(FrontendConfig, death_signal=signal.SIGTERM)
    set_up_logging(config.log_level, config.log_format)

    async def serve_until_told() -> None:
        heartbeats = asyncio.create_task(_heartbeat())
        signals = StopSignals()
        await serve(config, signals, Launcher(signals))
        heartbeats.cancel()

    try:
        run(serve_until_told)
    except FrontendError as error:
        tell_parent({"error": str(error)})
        sys.exit(1)


async def _heartbeat() -> None:
    while True:
        heartbeat()
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    main()
