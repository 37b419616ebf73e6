"""POST /classify: the probabilities of a classifier's labels for each text, as vLLM has it."""

from collections.abc import Iterator
from functools import partial

import msgspec

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.pooling.conversation import ConversationFields, ids_of_body
from quire.frontend.http.api.pooling.fields import PoolingUsage, need
from quire.frontend.http.api.pooling.run import PoolRun, params_of, usage_of
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response


class ClassifyRequest(ConversationFields, kw_only=True):
    pass


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
    model = await check_model(services, request, body.model)
    info = need(services, "classify")
    params = params_of(task="classify", dimensions=body.dimensions, use_activation=body.uses_activation)
    run = PoolRun(services, request, body, "classify")
    results = await run.pool(await ids_of_body(services, request, body), params)

    def items() -> Iterator[Classification]:
        rows = (result.tolist() for result in results.data)
        return (Classification(i, info.labels[row.index(max(row))], row, len(row)) for i, row in enumerate(rows))

    usage = usage_of(results.num_prompt_tokens)
    whole = partial(ClassifyResponse, run.name, run.created, model, usage=usage)
    await run.send(response, items, len(results.data), len(info.labels), whole)
