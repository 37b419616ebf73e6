"""The HTTP application with a store and batch runners, over a FakeClient; the test moves the clock."""

import asyncio
import contextlib
import json
import time

import fake_client as http

from quire.frontend.http.batches.runner import BatchRunner
from quire.frontend.http.store.storage import Storage

CHAT = "/v1/chat/completions"
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


class Clock:
    """Moved by hand, beside the real one, which stamps what is made."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class NotifyingStorage(Storage):
    """Says when something was done with the queue of batches: by a runner, but for what a test does itself."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.on_change = lambda: None

    async def queue(self, work):
        try:
            return await super().queue(work)
        finally:
            self.on_change()


class Kept(http.Api):
    """An Api with a store, and runners of batches. FakeClient's engine is full by its heartbeat: here it is idle."""

    def __init__(self, folder, client=None, **options) -> None:
        self.clock = Clock()
        self.storage = NotifyingStorage(str(folder), clock=self.clock, **options)
        super().__init__(client, storage=self.storage)
        self.client.heartbeat = None
        self.storage.on_change = self.client.news.set
        self.runners: list[asyncio.Task] = []

    def run(self) -> asyncio.Task:
        self.runners.append(asyncio.create_task(BatchRunner(self.app, self.storage, self.client).run_forever()))
        return self.runners[-1]

    async def stop(self, runner: asyncio.Task) -> None:
        runner.cancel()
        await asyncio.wait([runner])

    async def upload(self, *lines, owner_key="") -> str:
        content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        head = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        form = head % (b"purpose", b"", b"batch") + head % (b"file", b'; filename="in.jsonl"', content) + b"--b--"
        status, file = await self.json("POST", "/v1/files", form, FORM)
        assert status == 200, file
        return file["id"]

    async def make(self, *lines, **fields):
        body = {"input_file_id": await self.upload(*lines), "endpoint": CHAT, "completion_window": "24h", **fields}
        status, batch = await self.json("POST", "/v1/batches", body)
        assert status == 200, batch
        return batch["id"]

    async def get(self, id):
        return (await self.json("GET", f"/v1/batches/{id}"))[1]

    async def until(self, id, *statuses):
        return await self.until_is(id, lambda batch: batch["status"] in statuses)

    async def until_is(self, id, condition):
        async with asyncio.timeout(100):
            while True:
                self.client.news.clear()
                if condition(batch := await self.get(id)):
                    return batch
                await self.client.news.wait()

    async def until_submitted(self, count) -> None:
        await self.client.until(lambda: len(self.client.streams) >= count)

    async def until_completed(self, id, count) -> None:
        await self.until_is(id, lambda batch: batch["request_counts"]["completed"] >= count)

    async def lines(self, file_id) -> list:
        answer = await self.ask("GET", f"/v1/files/{file_id}/content")
        assert answer.status == 200
        return [json.loads(line) for line in answer.body.splitlines()]


@contextlib.asynccontextmanager
async def kept(folder, **options):
    api = Kept(folder, **options)
    try:
        yield api
    finally:
        for runner in api.runners:
            await api.stop(runner)
        await api.storage.close()


def chat(custom_id, **body):
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**http.HELLO, **body}}
