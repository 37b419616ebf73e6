"""What waits for a frontend of `quire serve --frontends N` while it is down: kept for its next process, in bounds."""

import asyncio
import os
import socket

import pytest
from deadlines import DEADLINE_S

from quire.frontend.cli import frontends as frontends_module
from quire.frontend.cli.frontends import Frontends
from quire.frontend.http.listener import bind
from quire.frontend.http.server import FrontendConfig
from quire.frontend.supervisor import StartFailed


def test_connections_that_wait_for_a_frontend_are_kept_up_to_a_limit(monkeypatch):
    """Without one, a full queue took all descriptors, and the frontend could never be started again."""
    monkeypatch.setattr(frontends_module, "MAX_KEPT", 3)
    sockets = bind("127.0.0.1", 0, 2)
    address = sockets[0].getsockname()
    frontends = Frontends(FrontendConfig(engine_addresses=[], listen_fd=-1), sockets, logs_engine_changes=False)
    other, down = frontends._all
    sockets[1].listen(16)  # as its process did
    clients = [socket.create_connection(address, timeout=DEADLINE_S) for _ in range(5)]
    other.is_up = True
    down.on_down()
    for connection in down._waiting:
        connection.sendall(b"x")
    said = []
    for client in clients:
        try:
            said.append(client.recv(1))
        except ConnectionResetError:
            said.append(b"")
        client.close()
    assert said == [b"x"] * 3 + [b""] * 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=DEADLINE_S)
    for kept in (sockets[0], *down._waiting):
        kept.close()


def test_a_frontend_that_is_not_ready_in_time_has_not_ended_by_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(frontends_module, "_START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(frontends_module, "_END_S", 0.1)
    metrics_fd = os.memfd_create("metrics")
    template = FrontendConfig(engine_addresses=[f"ipc://{tmp_path}/nobody"], listen_fd=-1, metrics_fd=metrics_fd)
    frontends = Frontends(template, bind("127.0.0.1", 0, 1), logs_engine_changes=False)
    with pytest.raises(StartFailed, match=r"^a frontend process was not ready within 0.1 s$"):
        asyncio.run(frontends.start())
    frontends._all[0].let_go()
    os.close(metrics_fd)
