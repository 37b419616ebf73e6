"""POST /classify: the probabilities of a classifier's labels for each text, as vLLM has it."""

from typing import Any

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.bodies.checked import check_model
from quire.frontend.http.api.pooling.fields import Input, PoolFields, PoolingUsage, ids_of, need, prompts_of, refuse
from quire.frontend.http.api.pooling.run import PoolRun, params_of, send, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response


class ClassifyRequest(PoolFields, kw_only=True):
    input: Input
    messages: Any = None  # refused


class Classification(msgspec.Struct, frozen=True):
    """label: the likeliest one. probs: in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: str = "list"


_decoder = BodyDecoder(ClassifyRequest)


async def classify(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = check_model(body.model, services.model_names)
    info = need(services, "classify")
    refuse(body, messages="conversations are not classified yet; render them to texts and give input")
    params = params_of(task="classify", dimensions=body.dimensions, use_activation=body.uses_activation)
    prompts, run = prompts_of(body.input), PoolRun(services, request, body, "classify")
    results = await run.pool(await ids_of(services, prompts, body), params)

    def make() -> bytes:
        rows = (result.tolist() for result in results.data)
        data = [Classification(i, info.labels[row.index(max(row))], row, len(row)) for i, row in enumerate(rows)]
        return json_bytes(ClassifyResponse(run.name, run.created, model, data, usage_of(results.num_prompt_tokens)))

    await send(response, make, len(results.data) * len(info.labels))
