"""BatchRunner: runs a frontend's share of its server's batches; store/batch_queue.py assigns batches to frontends.

It looks for work periodically, and when a batch is made here. A killed frontend loses its leases when they expire, and another
continues with the unanswered lines; an orderly shutdown gives them back at once. Requests go through the application's own
routes (in_process.py), as many at once as leave room for interactive requests (window.py).
"""

import asyncio
import logging
import secrets
from collections import Counter
from contextlib import suppress

from quire.frontend.client.client import Client
from quire.frontend.http.api.app import App
from quire.frontend.http.batches.in_process import RetryingApp
from quire.frontend.http.batches.run import BatchRun
from quire.frontend.http.batches.window import Window
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.batch_queue import LEASE_S
from quire.frontend.http.store.bounds import MAX_ANSWER_BYTES, MAX_BATCHES_AT_ONCE, MAX_BATCHES_OF_ALL
from quire.frontend.http.store.database import Record
from quire.frontend.http.store.storage import Storage

log = logging.getLogger("quire.http")

LOOK_S = LEASE_S / 3
_PURGE_S = 60.0


class BatchRunner:
    def __init__(self, app: App, storage: Storage, client: Client) -> None:
        self._app = RetryingApp(app.bounded(MAX_ANSWER_BYTES), client)
        self._storage = storage
        self._window = Window(client)
        self._holder = secrets.token_hex(16)
        self._running: dict[BatchRun, asyncio.Task[None]] = {}

    async def run_forever(self) -> None:
        """Run batches until cancelled; then stop them and give back their leases."""
        purging = asyncio.create_task(self._purge_forever())
        try:
            while True:
                await self._take_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._storage.batch_made.wait()
                self._storage.batch_made.clear()
                for run in self._running:
                    run.look()  # it may be cancelled
        finally:
            for task in (purging, *self._running.values()):
                task.cancel()
            if self._running:
                await asyncio.wait(self._running.values())
            with suppress(ApiError):
                await self._storage.queue(lambda queue: queue.give_back(self._holder))

    async def _take_all(self) -> None:
        while len(self._running) < MAX_BATCHES_OF_ALL:
            owners = Counter(run.owner for run in self._running)
            full = [owner for owner, num in owners.items() if num >= MAX_BATCHES_AT_ONCE]
            try:
                record = await self._storage.queue(lambda queue, full=full: queue.take(self._holder, full))  # type: ignore[misc]
            except ApiError as error:
                log.error("batches cannot be run now: %s", error.__cause__ or error)
                return
            if record is None:
                return
            run = BatchRun(self._app, self._storage, self._window, self._holder, record)
            self._running[run] = asyncio.create_task(self._run(run, record))

    async def _run(self, run: BatchRun, record: Record) -> None:
        try:
            await run.run()
        except asyncio.CancelledError:
            raise
        except BaseException:  # an error in one batch stops no other; its lease expires, and it is tried again
            log.exception("%s was given up", record.id)
        finally:
            del self._running[run]
            self._storage.batch_made.set()  # there is room for another

    async def _purge_forever(self) -> None:
        while True:
            with suppress(ApiError):
                await self._storage.purge()
            await asyncio.sleep(_PURGE_S)
