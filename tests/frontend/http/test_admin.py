"""What operators ask over HTTP: the prefix cache, profiles, the configuration."""

import asyncio

import fake_client as http
import pytest
from fake_client import CHAT, HELLO
from fake_core import FakeCore

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.stream import EngineDown, EngineError, InvalidRequest
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import ProfileDone, ResetDone, ResetPrefixCache, StartProfile, UtilityFailed


def test_reset_prefix_cache():
    async def main():
        api = http.Api()
        assert await api.json("POST", "/reset_prefix_cache") == (200, {"success": True})
        api.client.speak = None
        await api.wire().talk(api.encode("POST", CHAT, HELLO))
        assert await api.json("POST", "/reset_prefix_cache?reset_running_requests=false") == (200, {"success": False})
        for name in ("reset_running_requests", "reset_external"):
            status, answer = await api.json("POST", f"/reset_prefix_cache?{name}=true")
            assert status == 400 and answer["error"]["param"] == name

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_without_its_flag_says_which(path):
    async def main():
        api = http.Api(api_keys=["k"])
        assert (await api.ask("POST", path)).status == 401
        traces = ["rank0.json.gz"] if path == "/stop_profile" else []
        assert await api.json("POST", path, None, {"Authorization": "Bearer k"}) == (200, {"traces": traces})
        api.client.has_profiler = False
        status, answer = await api.json("POST", path, None, {"Authorization": "Bearer k"})
        assert status == 400 and "--profile-dir" in answer["error"]["message"]

    asyncio.run(main())


def test_server_info_in_both_formats():
    async def main():
        api = http.Api()
        status, answer = await api.json("GET", "/server_info")
        assert status == 200 and "model='tiny'" in answer["vllm_config"] and answer["system_env"]["python_version"]
        _, answer = await api.json("GET", "/server_info?config_format=json")
        assert answer["vllm_config"]["model"] == "tiny"
        status, answer = await api.json("GET", "/server_info?config_format=xml")
        assert status == 400 and answer["error"]["param"] == "config_format"

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------- the client's end of it
def test_a_call_is_answered_refused_or_ends_with_the_engine():
    async def main():
        core = FakeCore()
        async with AsyncClient(core.address) as client:

            async def call(what, kind, *answers) -> object:
                task = asyncio.create_task(client.utility(what, kind))
                asked = await asyncio.to_thread(core.next, Utility)
                assert asked.call == what
                for answer in answers:
                    core.say(UtilityResult(core.epoch, asked.id, answer))
                if not answers:
                    core.stop()
                return await task

            assert (await call(ResetPrefixCache(), ResetDone, ResetDone(True), ResetDone(False))).complete
            with pytest.raises(InvalidRequest, match="--profile-dir"):
                await call(StartProfile(), ProfileDone, UtilityFailed("invalid", "needs --profile-dir"))
            with pytest.raises(EngineError):
                await call(StartProfile(), ProfileDone, ResetDone(True))
            with pytest.raises(EngineDown):
                await call(StartProfile(), ProfileDone)
            with pytest.raises(EngineDown):
                await client.utility(ResetPrefixCache(), ResetDone)

    asyncio.run(main())
