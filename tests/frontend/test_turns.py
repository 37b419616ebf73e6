"""The thread beside the loop: whose errors are whose, and what it may keep up."""

import asyncio
import subprocess
import sys

import pytest

from quire.frontend.client.turns import in_thread

ENDLESS = """
import asyncio, threading
from quire.frontend.client.turns import in_thread

async def main():
    started = threading.Event()
    asyncio.ensure_future(in_thread(lambda: (started.set(), threading.Event().wait())))
    while not started.is_set():
        await asyncio.sleep(0)

asyncio.run(main())
print("ended")
"""


def test_what_a_call_returns_or_raises_is_its_callers_alone():
    async def main():
        async def fails():
            with pytest.raises(ZeroDivisionError):
                await in_thread(lambda: 1 // 0)

        gone = asyncio.ensure_future(in_thread(lambda: "nobody wants it"))
        gone.cancel()
        results = await asyncio.gather(in_thread(divmod, 7, 3), fails(), in_thread(lambda: "next"))
        assert results == [(2, 1), None, "next"]

    asyncio.run(main())


def test_a_call_that_never_ends_does_not_keep_the_process_from_its_end():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
