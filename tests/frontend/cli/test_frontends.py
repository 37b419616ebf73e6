"""The start of a frontend of `quire serve --frontends N`, without the others: how its failure is told."""

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from quire.frontend.cli import frontends as frontends_module
from quire.frontend.cli.frontends import Frontends
from quire.frontend.http.listener import bind
from quire.frontend.http.server import FrontendConfig
from quire.frontend.supervisor import StartFailed


@pytest.fixture
def frontends(tmp_path) -> Iterator[Frontends]:
    """One that waits for an engine for ever."""
    metrics_fd = os.memfd_create("metrics")
    template = FrontendConfig(engine_addresses=[f"ipc://{tmp_path}/nobody"], listen_fd=-1, metrics_fd=metrics_fd)
    frontends = Frontends(template, bind("127.0.0.1", 0, 1), logs_engine_changes=False)
    yield frontends
    frontends._all[0].let_go()
    os.close(metrics_fd)


def test_a_frontend_that_is_not_ready_in_time_has_not_ended_by_itself(monkeypatch, frontends):
    monkeypatch.setattr(frontends_module, "_START_TIMEOUT_S", 0.1)
    with pytest.raises(StartFailed, match=r"^a frontend process was not ready within 0.1 s$") as failed:
        asyncio.run(frontends.start())
    assert not failed.value.from_outside


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGSTOP, "was stopped by a signal while it started"),
        (signal.SIGKILL, r"ended while it started \(signal SIGKILL\)"),
    ],
)
def test_a_frontend_that_a_signal_hits_while_it_starts_is_given_up_soon(monkeypatch, frontends, number, why):
    async def start_and_hit() -> None:
        before = psutil.Process().children()
        starting = asyncio.create_task(frontends.start())
        while not (new := [child for child in psutil.Process().children() if child not in before]):
            await asyncio.sleep(0.0)
        new[0].send_signal(number)
        await starting

    monkeypatch.setattr(frontends_module, "HUNG_AFTER_S", 0.2)
    with pytest.raises(StartFailed, match=f"^a frontend process {why}$") as failed:
        asyncio.run(start_and_hit())
    assert failed.value.from_outside
