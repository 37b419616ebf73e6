"""background: true: a response that runs in this process after its request was answered; its client polls any frontend for it.

Its record has its status. Any frontend may write a cancellation there; the one that runs the response sees it within _LOOK_S.
That one also renews the record's lease while it runs, so a response of a server that was killed is known to have failed
(records.py).
"""

import asyncio
import logging
import math

import msgspec

from quire.frontend.http.api.chat_run import submit_chat
from quire.frontend.http.api.generate import running
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.responses.records import keep_begun, keep_result, touch
from quire.frontend.http.api.responses.running import RunningTurn
from quire.frontend.http.api.responses.translate import error_of
from quire.frontend.http.api.responses.turn import Turn
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError, internal_error, shutting_down

logger = logging.getLogger("quire.http")

MAX_RUNNING = 256  # in one frontend
_LOOK_S = 2.0


async def begin(services: Services, turn: Turn) -> bytes:
    """Start a response; returns, when it runs and has a record, its JSON without any output. Raises ApiError, ClientErrors."""
    tasks, id = services.state.background, turn.response.id
    if len(tasks) >= MAX_RUNNING:
        raise ApiError(503, "Too many responses run in the background.", code="overloaded", retry_after_s=5)
    begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    task = tasks[id] = asyncio.create_task(_run(services, turn, begun))
    task.add_done_callback(lambda _: tasks.pop(id))
    try:
        return await begun
    except asyncio.CancelledError:  # the client has disconnected without the response's id
        task.cancel()
        raise


async def let_end(services: Services, grace_s: float) -> None:
    """The server stops: wait up to grace_s for responses to end."""
    if tasks := list(services.state.background.values()):
        limit = "as long as it takes" if math.isinf(grace_s) else f"up to {grace_s:.0f} s"
        logger.info("stopping: %s for responses in the background to end: %d", limit, len(tasks))
        await asyncio.wait(tasks, timeout=None if math.isinf(grace_s) else grace_s)


async def end_all(services: Services) -> None:
    """Stop the responses that still run; they have failed."""
    tasks = list(services.state.background.values())
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _run(services: Services, turn: Turn, begun: asyncio.Future[bytes]) -> None:
    response, storage = turn.response, services.storage
    try:
        await _answer(services, turn, begun)
    except BaseException as error:  # any failure becomes the response's status, also a panic in Rust (tokenizers)
        if not begun.done():
            begun.cancel() if isinstance(error, asyncio.CancelledError) else begun.set_exception(error)
            return
        known = shutting_down() if isinstance(error, asyncio.CancelledError) else error_of(error, turn.tools)
        if known is None:
            logger.exception("a response in the background failed")
        response.fail(known or internal_error())
        await keep_result(storage, turn.owner, response, turn.items)


async def _answer(services: Services, turn: Turn, begun: asyncio.Future[bytes]) -> None:
    response, runs = turn.response, list[PromptRun]()
    async with running(response.id, runs, services.metrics, services.request_log):
        runs.append(submit_chat(services, turn.chat_body, turn.chat, response.id))
        services.request_log.started(response.id, runs, False)
        await keep_begun(services.storage, turn.owner, response, turn.items)
        # now, as the output may be there before the client has its answer, which is "queued" as OpenAI's and vLLM's are
        begun.set_result(json_bytes(msgspec.structs.replace(response, status="queued")))
        watch = asyncio.create_task(_watch(services, turn, runs[0]))
        try:
            await RunningTurn(services, turn, runs[0]).whole()
        finally:
            watch.cancel()


async def _watch(services: Services, turn: Turn, run: PromptRun) -> None:
    """Renew the lease until the response is cancelled or deleted; then cancel its stream."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            if not await touch(services.storage, turn.owner, turn.response.id):
                return run.stream.cancel()
        except ApiError as error:  # e.g. the disk is full; the next try may succeed
            logger.warning("a response in the background could not be looked after: %s", error.message)
