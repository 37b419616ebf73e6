"""What a request leaves is freed when it ends, not when the garbage collector comes: a server looks at everything rarely."""

import asyncio
import gc

import fake_client as http
from fake_client import CHAT, COMPLETIONS, HELLO

from quire.frontend.http.garbage import BUSY_EVERY_S, IDLE_EVERY_S, GarbageCollection


def test_neither_requests_nor_connections_refer_to_themselves():
    async def main():
        api = http.Api()
        bodies = [
            (CHAT, HELLO),
            (CHAT, {**HELLO, "stream": True, "logprobs": True, "top_logprobs": 2}),
            (CHAT, {**HELLO, "temperature": -1}),
            (CHAT, {"messages": 5}),
            (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logprobs": 3, "echo": True}),
        ]

        async def ask_all() -> None:
            for path, body in bodies:
                wire = api.wire()
                await wire.talk(api.encode("POST", path, body))
                assert wire.answers()
                wire.connection.connection_lost(None)
                wire.transport.protocol = None  # as a real one does
                api.client.streams.clear()

        await ask_all()
        gc.collect()
        gc.disable()
        try:
            await ask_all()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith(("quire", "httptools"))}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert ours == set()

    asyncio.run(main())


def test_everything_is_looked_at_in_quiet_moments():
    now, thresholds, before = [0.0], gc.get_threshold(), gc.get_freeze_count()
    try:
        garbage = GarbageCollection(lambda: now[0])
        assert gc.get_freeze_count() > before and gc.get_threshold()[:2] == thresholds[:2]
        assert not garbage.look(is_idle=True)
        now[0] = IDLE_EVERY_S
        assert not garbage.look(is_idle=False) and garbage.look(is_idle=True) and not garbage.look(is_idle=True)
        now[0] += BUSY_EVERY_S
        assert garbage.look(is_idle=False)
    finally:
        gc.set_threshold(*thresholds)
