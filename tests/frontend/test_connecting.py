"""AsyncClient.connect beside itself and beside close: one link at most, and none that nobody closes."""

import asyncio
from typing import Any

import pytest
from fake_core import FakeCore, echo

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.stream import EngineDown
from quire.ipc.links.frontend_to_core import FrontendToCore
from quire.ipc.sampling import SamplingParams


def test_those_who_connect_at_once_share_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[FrontendToCore] = []
    connect = FrontendToCore.connect

    async def counted(*args: Any, **options: Any) -> FrontendToCore:
        links.append(await connect(*args, **options))
        return links[-1]

    monkeypatch.setattr(FrontendToCore, "connect", counted)

    async def run() -> None:
        with FakeCore(echo) as core:
            client = AsyncClient(core.address)
            await asyncio.gather(*(client.connect() for _ in range(5)))
            assert len(links) == 1 and links[0] is client._link
            async for output in client.generate([1], SamplingParams(max_tokens=1)):
                assert output.finished
            await client.close()
            assert not links[0].connected

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_client_that_is_closed_while_it_connects_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, come, go = FrontendToCore.connect, asyncio.Event(), asyncio.Event()
    links: list[FrontendToCore] = []

    async def late(*args: Any, **options: Any) -> FrontendToCore:
        links.append(await connect(*args, **options))
        come.set()
        await go.wait()
        return links[-1]

    monkeypatch.setattr(FrontendToCore, "connect", late)

    async def run() -> None:
        with FakeCore() as core:
            client = AsyncClient(core.address)
            connecting = asyncio.create_task(client.connect())
            await come.wait()
            with pytest.raises(EngineDown, match="has been connecting"):
                await client.connect(timeout_s=0.01)
            await client.close()
            go.set()
            with pytest.raises(EngineDown, match="closed"):
                await connecting
            assert client._link is None and not links[0].connected

    asyncio.run(asyncio.wait_for(run(), 30))
