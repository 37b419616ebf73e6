"""POST /score and /v1/score: how well pairs of texts fit, one text with n or n with n, as vLLM has it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from quire.frontend.client.scoring import paired
from quire.frontend.client.turns import if_many
from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.pooling.fields import MAX_DOCUMENTS, PoolFields, PoolingUsage, kept, need, prompts_of, refuse_raw
from quire.frontend.http.api.pooling.run import PoolRun, params_of, usage_of
from quire.frontend.http.api.pooling.vectors import NUMBERS_OF_WEIGHT
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response


class ScoreRequest(PoolFields, kw_only=True):
    """text_1 and text_2 are also called queries and documents, or data_1 and data_2."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    instruction: str | None = None
    weights_for_different_modes: list[float] | None = None


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


_decoder = BodyDecoder(ScoreRequest)


async def score(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_decoder, request, services.unknown_fields)
    model = await check_model(services, request, body.model)
    need(services, "classify", "embed", "token_embed")
    refuse_raw(body)
    first = await _side(body, "text_1", "queries", "data_1")
    second = await _side(body, "text_2", "documents", "data_2")
    if len(first) not in (1, len(second)):
        raise invalid(f"text_1 must hold one text, or as many as text_2: got {len(first)} and {len(second)}", "text_1")
    params = params_of(task=None, use_activation=body.uses_activation, dimensions=body.dimensions)
    run = PoolRun(services, request, body, "score")
    pairs = await if_many(len(second), paired, first, second)
    scores = await run.score(
        pairs, params, keep=kept(body), instruction=body.instruction, weights=body.weights_for_different_modes
    )

    def items() -> Iterator[Score]:
        return (Score(i, value) for i, value in enumerate(scores.scores.tolist()))

    whole = partial(ScoreResponse, run.name, run.created, model, usage=usage_of(scores.results.num_prompt_tokens))
    await run.send(response, items, len(scores.scores), NUMBERS_OF_WEIGHT, whole)


async def _side(body: ScoreRequest, *names: str) -> list[Any]:
    """The texts of one side of the pairs, by any of its names. Raises ApiError 400."""
    for name in names:
        if (value := getattr(body, name)) is not None:
            return await if_many(len(value), prompts_of, value, name, MAX_DOCUMENTS)
    raise invalid(f"{names[0]}: this field is required", names[0])
