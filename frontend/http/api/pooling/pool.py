"""POST /pooling: vLLM's route of every task: its result is the numbers of a prompt, or rows of numbers of its tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from quire.frontend.client.pooling_parts import split_tasks
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.schemas import ShortText
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.pooling.conversation import ConversationFields, ids_of_body
from quire.frontend.http.api.pooling.fields import PoolingUsage, need, prompt_for_tokens
from quire.frontend.http.api.pooling.run import PoolRun, params_of, usage_of
from quire.frontend.http.api.pooling.vectors import NUMBERS_OF_WEIGHT, VectorFormat
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.pooling import TASKS, PoolingInfo, check_pooling


class PoolingRequest(ConversationFields, kw_only=True):
    """task: None is the tokens' one of what the model does, as in vLLM; several are answered from one pass."""

    task: ShortText | list[ShortText] | None = None
    prompt_name: ShortText | None = None
    encoding_format: ShortText | None = None
    embed_dtype: ShortText | None = None
    endianness: ShortText | None = None


class PoolingData(msgspec.Struct, frozen=True):
    """data: numbers, rows of them, weights of tokens, or base64 of their bytes; of several tasks an object with each."""

    index: int
    data: Any
    object: str = "pooling"


class PoolingResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[PoolingData]
    usage: PoolingUsage
    object: str = "list"


_decoder = BodyDecoder(PoolingRequest)


async def pooling(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = await check_model(services, request, body.model)
    info = need(services, *TASKS)
    tasks = _tasks(body, info)
    form = VectorFormat(body.encoding_format, body.embed_dtype, body.endianness, request.is_patient)
    if form.is_binary and len(tasks) > 1:
        raise invalid("encoding_format: bytes are those of one task; base64 is possible", "encoding_format")
    which = {"task": tasks[0]} if len(tasks) == 1 else {"tasks": tasks}
    params = params_of({"tasks": "task"}, **which, dimensions=body.dimensions, use_activation=body.uses_activation)
    run = PoolRun(services, request, body, "pool")
    before, is_query = prompt_for_tokens(info, body.prompt_name)
    ids = await ids_of_body(services, request, body, before, is_query)
    results = await run.pool(ids, params)
    usage = usage_of(results.num_prompt_tokens)
    if form.is_binary:
        about = {"id": run.name, "created": run.created, "model": model, "usage": msgspec.structs.asdict(usage)}
        return await form.send_binary(response, results.data, about)

    def items() -> Iterator[PoolingData]:
        if len(tasks) == 1:
            return (PoolingData(i, form.json(result, tasks[0])) for i, result in enumerate(results.data))
        row = check_pooling(params, info, services.limits.tasks)
        parts = (split_tasks(result, row, info, len(ids[i])) for i, result in enumerate(results.data))
        return (PoolingData(i, {task: form.json(own[task], task) for task in tasks}) for i, own in enumerate(parts))

    whole = partial(PoolingResponse, run.name, run.created, model, usage=usage)
    widest = max(result.size for result in results.data) * (NUMBERS_OF_WEIGHT if "embed_sparse" in tasks else 1)
    await run.send(response, items, len(results.data), widest, whole)


def _tasks(body: PoolingRequest, info: PoolingInfo) -> list[Any]:
    """The tasks that are asked for. Raises ApiError 400."""
    if body.task is None:
        return [next((task for task in ("token_embed", "token_classify") if task in info.tasks), info.tasks[0])]
    tasks = [body.task] if isinstance(body.task, str) else body.task
    for task in tasks:
        if task not in info.tasks:
            raise invalid(f"task must be one of {', '.join(info.tasks)} for this model, got {task}", "task")
    if not tasks:
        raise invalid("task: a list of tasks must hold at least one", "task")
    return tasks
