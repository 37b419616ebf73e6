"""A client's adapters when the engine that had them is lost: its successors are told, however often that happens."""

import asyncio
import tempfile
import time

from fake_core import LIMITS, FakeCore
from msgspec.structs import replace
from own_loop import heard, until

from quire.frontend.client.async_client import AsyncClient
from quire.ipc.adapters import AdapterFile, AdapterInfo, AdapterLimits
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import AdaptersRestored, RestoreAdapters

WITH_ADAPTERS = replace(LIMITS, adapters=AdapterLimits())


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, AdapterFile(f"/{name}", 1, 2, 3, 4), loaded_at=time.time())


async def asked_to_restore(core: FakeCore) -> tuple[Utility, list[str]]:
    call = await heard(core, Utility)
    assert isinstance(call.call, RestoreAdapters)
    return call, [each.name for each in call.call.adapters]


async def _lose_two_engines(address: str) -> None:
    client = AsyncClient(address)
    with FakeCore(address=address, limits=WITH_ADAPTERS, adapters=[info("a"), info("b")]):
        await client.connect()
        assert client.adapters.keys() == {"a", "b"}
    with FakeCore(address=address, limits=WITH_ADAPTERS) as second:
        _, names = await asked_to_restore(second)
        assert names == ["a", "b"] and client.adapters.keys() == {"a", "b"}, "requests may name them meanwhile"
    with FakeCore(address=address, limits=WITH_ADAPTERS) as third:
        call, names = await asked_to_restore(third)
        assert names == ["a", "b"], "the second engine was lost before it had them"
        third.say(UtilityResult(third.epoch, call.id, AdaptersRestored(["b"])))
        await until(lambda: client.adapters.keys() == {"a"})
    await client.close()


def test_an_engine_that_is_lost_before_it_has_all_adapters_takes_none_along() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(_lose_two_engines(f"ipc://{folder}/core"), 100))
