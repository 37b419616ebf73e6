"""ServiceManager: what systemd is told of a server, by the protocol of sd_notify(3): ready, reloading, stopping, alive.

With one frontend the launcher serves, and no process of ours watches it. So its event loop sends the watchdog's messages
(WatchdogSec=): if the loop hangs, they stop, and systemd starts the server again. Used by serve.py; without systemd, and under
other managers, nothing is sent.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn


class ServiceManager:
    """environment: where the manager says how it listens (NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        is_ours = pid in ("", str(os.getpid()))
        self._interval_s = int(usec) / 2e6 if usec.isdecimal() and is_ours and self._address else 0.0

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def beat(self) -> NoReturn:
        """Say that the event loop turns, until cancelled."""
        if not self._interval_s:
            await asyncio.Event().wait()
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._interval_s)

    def _send(self, state: str) -> None:
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
