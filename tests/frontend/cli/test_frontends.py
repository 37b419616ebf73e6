"""The start of a frontend of `quire serve --frontends N`, without the others: how its failure is told."""

import asyncio
import os

import pytest

from quire.frontend.cli import frontends as frontends_module
from quire.frontend.cli.frontends import Frontends
from quire.frontend.http.listener import bind
from quire.frontend.http.server import FrontendConfig
from quire.frontend.supervisor import StartFailed


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
