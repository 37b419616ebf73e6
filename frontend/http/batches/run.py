"""BatchRun: one frontend runs one batch, from its input to its output files, or from where another frontend stopped.

Two tasks: `_feed` starts lines as the window permits and gathers answers; `_keep` writes the gathered answers, which renews the
lease, and learns whether the batch is cancelled, expired or no longer ours. The first task to end decides how the batch ends.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from quire.frontend.http.api.files import new_file, new_file_id
from quire.frontend.http.batches.in_process import RetryingApp
from quire.frontend.http.batches.input_file import InputFile
from quire.frontend.http.batches.lines import BadLine, Line, answer_line, error_line
from quire.frontend.http.batches.record import (
    KEPT_S,
    BatchError,
    BatchErrors,
    RequestCounts,
    changed,
    decode,
    to_status,
)
from quire.frontend.http.batches.window import Window
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.batch_queue import LEASE_S, Answer, Result
from quire.frontend.http.store.bounds import MAX_BATCH_ERRORS, MAX_BATCH_LINES, MAX_INPUT_LINES
from quire.frontend.http.store.database import Record
from quire.frontend.http.store.storage import Storage

_RENEW_S = LEASE_S / 3
_RETRY_S = 1.0  # between attempts to write
_EXPIRED = "This request could not be executed before the completion window expired."


T = TypeVar("T")


class _Ends(Exception):
    """The batch ends before all lines are answered. status None: another frontend has its lease now."""

    def __init__(self, status: str | None, errors: list[BatchError] | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.errors = errors or []


class BatchRun:
    def __init__(self, app: RetryingApp, storage: Storage, window: Window, holder: str, record: Record) -> None:
        self._app = app
        self._storage = storage
        self._window = window
        self._holder = holder
        self._id, self.owner = record.id, record.owner
        self._batch = decode(record.body)
        self._counts = self._batch.request_counts
        self._input: InputFile | None = None
        self._ids: dict[int, str] = {}  # line -> custom_id
        self._done: dict[int, bool] = {}  # line -> whether it succeeded
        self._answers: list[Answer] = []  # not written yet
        self._fed = False  # all lines are answered
        self._news = asyncio.Event()

    def look(self) -> None:
        """Check the batch's record for changes soon."""
        self._news.set()

    async def run(self) -> None:
        status, errors = "completed", list[BatchError]()
        try:
            try:
                await self._prepare()
                await beside(self._feed(), self._keep())
            except _Ends as end:
                if end.status is None:
                    raise
                status, errors = end.status, end.errors
            await beside(self._finish(status, errors), self._renew())
        except _Ends:  # another frontend has the lease
            return
        finally:
            if self._input is not None:
                self._input.close()

    # ------------------------------------------------------------------------------------------------------- validating
    async def _prepare(self) -> None:
        """Read the whole input. Raises _Ends if it has errors; then none of its lines runs."""
        errors = await beside(self._read_input(), self._renew())
        if errors:
            raise _Ends("failed", errors)
        await self._count_again()
        await self._save(to_status("in_progress", self._now) if self._batch.status == "validating" else bytes)
        self._check_end()

    async def _count_again(self) -> None:
        """Count the answered lines by the answers in the store."""
        self._done = await self._storage.queue(lambda queue: queue.answered(self._id))
        num_ok = sum(self._done.values())
        self._counts = RequestCounts(len(self._ids), num_ok, len(self._done) - num_ok)

    async def _read_input(self) -> list[BatchError]:
        try:
            fd = await self._storage.open_content(self._batch.input_file_id)
        except FileNotFoundError:
            return [BatchError("input_file_gone", "The input file is not there any more.", "input_file_id")]
        self._input = await asyncio.to_thread(InputFile, fd, MAX_INPUT_LINES)
        return await asyncio.to_thread(self._check, self._input)

    def _check(self, file: InputFile) -> list[BatchError]:
        """In a thread: returns the input's errors, and enters the valid lines in self._ids."""
        if file.has_more or len(file.numbers) > MAX_BATCH_LINES:
            return [BatchError("too_many_lines", f"The input file has more than {MAX_BATCH_LINES} lines.")]
        if not file.numbers:
            return [BatchError("empty_file", "The input file has no line.")]
        errors: list[BatchError] = []
        for number, line in file.check():
            if isinstance(line, Line) and line.url == self._batch.endpoint:
                self._ids[number] = line.custom_id
            elif len(errors) < MAX_BATCH_ERRORS:
                errors.append(_fault(line, number, self._batch.endpoint))
        return errors

    # -------------------------------------------------------------------------------------------------------- answering
    async def _feed(self) -> None:
        """Start one line after another, with a turn of the event loop between: preparing a line blocks it for milliseconds."""
        assert self._input is not None
        async with asyncio.TaskGroup() as group:
            for number in self._ids:
                if number not in self._done:
                    line = await asyncio.to_thread(self._input.read, number)
                    await self._window.enter(self.owner)
                    group.create_task(self._answer(number, line)).add_done_callback(lambda _: self._window.leave(self.owner))
        self._fed = True
        self._news.set()
        await asyncio.Event().wait()  # _keep ends when all is written

    async def _answer(self, number: int, line: Line) -> None:
        reply = await self._app.ask(line, self.owner)
        self._add(number, reply.status == 200, answer_line(line.custom_id, reply.request_id, reply.status, reply.body))

    def _add(self, number: int, ok: bool, body: bytes) -> None:
        counts = self._counts
        self._counts = RequestCounts(counts.total, counts.completed + ok, counts.failed + (not ok))
        self._done[number] = ok
        self._answers.append(Answer(number, ok, body))
        self._news.set()

    # ---------------------------------------------------------------------------------------------------------- keeping
    async def _keep(self) -> None:
        """Write answers until all are written. Raises _Ends."""
        while not self._fed or self._answers:
            self._news.clear()
            await self._save()
            self._check_end()
            if not self._fed or self._answers:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RENEW_S):  # not wait_for, which in Python 3.11 may swallow a cancellation
                        await self._news.wait()

    def _check_end(self) -> None:
        """Raises _Ends."""
        if self._batch.status == "cancelling":
            raise _Ends("cancelled")
        if self._now >= self._batch.expires_at:
            raise _Ends("expired")

    async def _renew(self) -> None:
        while True:
            await self._save()
            await asyncio.sleep(_RENEW_S)

    async def _save(self, change: Callable[[bytes], bytes] = bytes) -> None:
        """Write the gathered answers and a change of the record; this renews the lease. Raises _Ends."""
        answers, self._answers, counts = self._answers, [], self._counts
        try:
            body = await self._storage.queue(
                lambda queue: queue.save(
                    self._id, self._holder, answers, lambda body: changed(change(body), request_counts=counts)
                )
            )
        except ApiError as error:
            if error.code == "storage_full":
                raise _Ends("failed", [BatchError("storage_full", error.message)]) from None
            self._answers = answers + self._answers  # the disk cannot be written now: try again while we have the lease
            return
        if body is None:
            raise _Ends(None)
        self._batch = decode(body)

    @property
    def _now(self) -> int:
        return int(self._storage.clock())

    # ------------------------------------------------------------------------------------------------------- finalizing
    async def _finish(self, status: str, errors: list[BatchError]) -> None:
        """Turn the answers into files and end the record."""
        try:
            if status == "completed":
                await self._save(to_status("finalizing", self._now))
            elif status == "expired":
                self._expire_rest()
            while self._answers:
                await self._save()
                await asyncio.sleep(_RETRY_S if self._answers else 0.0)
        except _Ends as end:  # the store is full: keep the answers written so far
            if end.status is None:
                raise
            status, errors = end.status, errors + end.errors
        await self._count_again()
        output, error_file = await self._write(True), await self._write(False)
        change = to_status(
            status,
            self._now,
            request_counts=self._counts,
            output_file_id=output.id if output else None,
            error_file_id=error_file.id if error_file else None,
            errors=BatchErrors(errors) if errors else None,
        )
        results = [result for result in (output, error_file) if result is not None]
        expires_at = self._now + KEPT_S
        await self._storage.queue(lambda queue: queue.finish(self._id, self._holder, results, change, expires_at))

    def _expire_rest(self) -> None:
        for number, custom_id in self._ids.items():
            if number not in self._done:
                self._add(number, False, error_line(custom_id, "batch_expired", _EXPIRED))

    async def _write(self, ok: bool) -> Result | None:
        """Write the answers of one kind as a content; None if there are none."""
        id = new_file_id()
        await self._storage.reserve(self.owner, id, 0)
        size = await self._storage.write_answers(self._id, ok, id)
        if size == 0:
            await self._storage.forget(self.owner, id)
            return None
        name = f"{self._id}_{'output' if ok else 'error'}.jsonl"
        return new_file(self._storage, id, name, "batch_output", size, self._batch.output_expires_after_s)


def _fault(line: Line | BadLine, number: int, endpoint: str) -> BatchError:
    if isinstance(line, BadLine):
        return BatchError(line.code, f"{line.message}.", line.param, number)
    return BatchError("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}.", "url", number)


async def beside(work: Coroutine[Any, Any, T], keeper: Coroutine[Any, Any, None]) -> T | None:
    """Run both until one ends or fails, and return or raise its outcome; the other is cancelled."""
    tasks = [asyncio.create_task(work), asyncio.create_task(keeper)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            tasks[1].result()
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del task, tasks  # their exceptions refer to this frame: avoid a reference cycle
