"""The work of `quire run-batch`: an engine, the application's routes without an HTTP server, and two files.

Answers are written as they arrive, in any order. Ctrl-C and SIGTERM end the job and keep the answers so far; the same command
continues from there. The engine is restarted when it dies, as `quire serve` does; a request that kills it repeatedly fails.
"""

import asyncio
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from typing import BinaryIO, Self

from tqdm import tqdm

from quire.frontend.cli.answers_file import AnswersFile, BatchFileError
from quire.frontend.cli.engines import Engines
from quire.frontend.client.stream import EngineDown
from quire.frontend.http.api.app import App
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.api.services import Services
from quire.frontend.http.batches.in_process import RetryingApp
from quire.frontend.http.batches.input_file import InputFile
from quire.frontend.http.batches.lines import Line, answer_line, error_line
from quire.frontend.http.server import run
from quire.frontend.launcher import EngineStartError
from quire.frontend.replicas.replicas import client_of
from quire.frontend.supervisor import StartFailed
from quire.ipc.config import EngineConfig
from quire.ipc.process.command import stop_signals
from quire.ipc.process.logs import set_up_logging

_URL_TIMEOUT_S = 60.0
_BAR_DELAY_S = 1.0  # a shorter job shows no bar
_BAR_REFRESH_S = 0.5


def run_job(input_name: str, output_name: str, config: EngineConfig, parsers: ParserNames) -> int:
    """The exit code: 0 all succeeded, 1 some failed or the engine cannot run, 130 interrupted. Raises BatchFileError."""
    set_up_logging(config.log_level, config.log_format)
    with _opened(input_name) as file:
        job = Job(InputFile(file.fileno()), AnswersFile(output_name))
        try:
            job.refuse_bad_lines()
            if job.todo:
                _run_with_engine(job, config, parsers)
        except (EngineStartError, StartFailed, EngineDown, ValueError) as error:
            print(f"quire run-batch: {error}", file=sys.stderr)
        except OSError as error:
            print(f"quire run-batch: {output_name}: {error.strerror}", file=sys.stderr)
        except KeyboardInterrupt:
            job.interrupted = True
        finally:
            job.answers.close()
    print(job.summary(output_name), file=sys.stderr)
    if job.interrupted:
        return 130
    return 1 if job.todo or job.answers.num_failed else 0


def _opened(name: str) -> BinaryIO:
    """The input as a regular file. Raises BatchFileError."""
    try:
        if name == "-":
            return _spooled(sys.stdin.buffer)
        if name.startswith(("http://", "https://")):
            with urllib.request.urlopen(name, timeout=_URL_TIMEOUT_S) as answer:
                return _spooled(answer)
        file = open(name, "rb")
        return file if file.seekable() else _spooled(file)
    except (OSError, ValueError, HTTPException) as error:
        raise BatchFileError(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def _spooled(source: BinaryIO) -> BinaryIO:
    file: BinaryIO = tempfile.TemporaryFile()  # type: ignore[assignment]
    shutil.copyfileobj(source, file)
    file.flush()
    return file


class Job:
    """todo: numbers of the lines not answered yet."""

    def __init__(self, file: InputFile, answers: AnswersFile) -> None:
        self.file = file
        self.answers = answers
        self.todo: dict[int, None] = {}
        self.interrupted = False
        self._num_before = len(answers.answered) + len(answers.refused)
        self._num_answered = 0
        self._began = time.monotonic()

    def refuse_bad_lines(self) -> None:
        """Answer unreadable lines with their error and number; enter the others in todo."""
        for number, line in self.file.check():
            if isinstance(line, Line):
                if line.custom_id not in self.answers.answered:
                    self.todo[number] = None
            elif number not in self.answers.refused:
                self.answers.write(error_line(line.custom_id, line.code, f"line {number}: {line.message}.", number))
                self.answers.num_failed += 1
                self._num_answered += 1

    async def answer_all(self, app: RetryingApp, window: int, bar: "Bar") -> None:
        numbers = iter(list(self.todo))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(window, len(self.todo))):
                group.create_task(self._answer_each(numbers, app, bar))

    async def _answer_each(self, numbers: Iterator[int], app: RetryingApp, bar: "Bar") -> None:
        for number in numbers:
            line = self.file.read(number)
            reply = await app.ask(line)
            self.answers.write(answer_line(line.custom_id, reply.request_id, reply.status, reply.body))
            del self.todo[number]
            self._num_answered += 1
            self.answers.num_failed += reply.status != 200
            bar.add(self.answers.num_failed)

    def summary(self, output_name: str) -> str:
        before = f", {self._num_before} before" if self._num_before else ""
        failed = f"{self.answers.num_failed} failed" if self.answers.num_failed else "all succeeded"
        left = f"; {len(self.todo)} are left: the same command goes on with them" if self.todo else f"; {failed}"
        where = "" if output_name == "-" else f" in {output_name}"
        return f"{self._num_answered} requests answered in {time.monotonic() - self._began:.1f} s{before}{where}{left}"


def _run_with_engine(job: Job, config: EngineConfig, parsers: ParserNames) -> None:
    """Raises EngineStartError, StartFailed, EngineDown, OSError."""
    engine = Engines(config)
    try:
        engine.start()
        run(lambda: _run_beside(job, engine, parsers))
    finally:
        engine.stop()


async def _run_beside(job: Job, engine: Engines, parsers: ParserNames) -> None:
    """Answer all lines, and keep the engine alive, until that is done or a stop is requested."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    async with client_of(engine.addresses) as client:  # raises EngineDown, ValueError
        services = Services.make(client, parsers=parsers)
        app = App(services)
        window = max(64, 4 * client.welcome.limits.max_num_seqs)
        with Bar(len(job.todo)) as bar:
            working = asyncio.create_task(job.answer_all(RetryingApp(app, client), window, bar))
            keeper, stopping = asyncio.create_task(engine.keep_alive()), asyncio.create_task(stop.wait())
            tasks = (working, keeper, stopping)
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                job.interrupted = stop.is_set() and not working.done()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await services.storage.close()
    for task in (working, keeper):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error


class Bar:
    """A progress bar over requests; it appears for jobs that take a while."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, desc="Running batch", unit="req", delay=_BAR_DELAY_S, dynamic_ncols=True)
        self._bar.mininterval = _BAR_REFRESH_S

    def add(self, num_failed: int) -> None:
        if num_failed:
            self._bar.set_postfix_str(f"failed: {num_failed}", refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # stderr is closed
            self._bar.close()
