"""POST /pooling: vLLM's route of every task: its result is the numbers of a prompt, or rows of numbers of its tokens."""

from typing import Any

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import check_model
from quire.frontend.http.api.bodies.schemas import ShortText
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.pooling.fields import Input, PoolFields, PoolingUsage, ids_of, need, prompts_of, refuse
from quire.frontend.http.api.pooling.run import PoolRun, params_of, send, usage_of
from quire.frontend.http.api.pooling.vectors import VectorFormat
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.pooling import TASKS


class PoolingRequest(PoolFields, kw_only=True):
    """task: None is the tokens' one of what the model does, as in vLLM."""

    input: Input
    task: ShortText | None = None
    encoding_format: ShortText | None = None
    embed_dtype: ShortText | None = None
    endianness: ShortText | None = None
    messages: Any = None  # refused


class PoolingData(msgspec.Struct, frozen=True):
    """data: numbers, rows of them, or base64 of their bytes."""

    index: int
    data: list[float | list[float]] | str
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
    model = check_model(body.model, services.model_names)
    info = need(services, *TASKS)
    refuse(body, messages="prompts that are conversations are not served yet; render them to texts and give input")
    task = body.task or next((task for task in ("token_embed", "token_classify") if task in info.tasks), info.tasks[0])
    if task not in info.tasks:
        raise invalid(f"task must be one of {', '.join(info.tasks)} for this model, got {task}", "task")
    form = VectorFormat(body.encoding_format, body.embed_dtype, body.endianness, request.is_patient)
    params = params_of(task=task, dimensions=body.dimensions, use_activation=body.uses_activation)
    prompts, run = prompts_of(body.input), PoolRun(services, request, body, "pool")
    results = await run.pool(await ids_of(services, prompts, body), params)
    usage = usage_of(results.num_prompt_tokens)
    if form.is_binary:
        about = {"id": run.name, "created": run.created, "model": model, "usage": msgspec.structs.asdict(usage)}
        return form.send_binary(response, results.data, about)

    def make() -> bytes:
        data = [PoolingData(i, form.json(result)) for i, result in enumerate(results.data)]
        return json_bytes(PoolingResponse(run.name, run.created, model, data, usage))

    await send(response, make, sum(result.size for result in results.data))
