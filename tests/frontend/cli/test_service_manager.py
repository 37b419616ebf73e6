"""What systemd is told of a server: the datagrams of sd_notify, read from the other end."""

import asyncio
import os
import socket

import pytest

from quire.frontend.cli.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}


def heard(sock: socket.socket) -> list[str]:
    said = []
    while True:
        try:
            said.append(sock.recv(4096).decode())
        except BlockingIOError:
            return said


def test_a_server_says_that_it_is_ready_reloads_and_stops(manager):
    sock, environment = manager
    service = ServiceManager(environment)
    service.ready("serves tiny")
    service.reloading()
    service.stopping()
    ready, reloading, stopping = heard(sock)
    assert ready == "READY=1\nSTATUS=serves tiny" and stopping == "STOPPING=1"
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=") and reloading.rpartition("=")[2].isdecimal()


@pytest.mark.parametrize("beats", [True, False])
def test_the_event_loop_beats_while_it_turns_if_that_is_asked_of_this_process(manager, beats):
    pid = str(os.getpid()) if beats else "1"

    async def main():
        loop, counted = asyncio.get_running_loop(), asyncio.Event()
        said = list[str]()

        def count() -> None:
            said.extend(heard(sock))
            if len(said) >= 3:
                counted.set()

        loop.add_reader(sock.fileno(), count)
        beat = asyncio.create_task(ServiceManager({**environment, "WATCHDOG_PID": pid}).beat())
        if beats:
            await counted.wait()
        else:
            ServiceManager(environment).ready("")
            while not said:
                await asyncio.sleep(0)
        beat.cancel()
        loop.remove_reader(sock.fileno())
        assert set(said) == ({"WATCHDOG=1"} if beats else {"READY=1\nSTATUS="})

    sock, environment = manager
    asyncio.run(main())


def test_without_a_manager_nothing_is_sent():
    ServiceManager({}).ready("serves tiny")
    ServiceManager({"NOTIFY_SOCKET": "/nowhere/notify"}).stopping()
