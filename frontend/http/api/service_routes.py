"""/v1/models, /version, /metrics, and browsers' preflights."""

from quire.frontend.http.api.bodies.checked import check_model
from quire.frontend.http.api.bodies.schemas import ModelCard, ModelList, ModelPermission, VersionResponse
from quire.frontend.http.api.metrics.metrics_text import CONTENT_TYPE, EngineState, metrics_text
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response


async def list_models(services: Services, request: Request, response: Response) -> None:
    names = services.model_names
    response.send(200, json_bytes(ModelList(data=[_card(services, name) for name in names])))


async def one_model(services: Services, request: Request, response: Response) -> None:
    """GET /v1/models/{model}: an id may contain slashes, plain or percent-encoded."""
    name = check_model(request.path_parameters["model"], services.model_names)
    response.send(200, json_bytes(_card(services, name)))


def _card(services: Services, name: str) -> ModelCard:
    welcome = services.client.welcome
    return ModelCard(
        id=name,
        created=welcome.created,
        root=welcome.served_model_names[0],
        max_model_len=welcome.limits.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=welcome.created)],
    )


async def preflight(services: Services, request: Request, response: Response) -> None:
    """A browser's OPTIONS before a page's request, to any path. Every answer has the headers that it asks for (cors.py)."""
    response.send(200)


async def version(services: Services, request: Request, response: Response) -> None:
    response.send(200, json_bytes(VersionResponse(services.client.welcome.version)))


async def metrics(services: Services, request: Request, response: Response) -> None:
    client = services.client
    engines = [
        EngineState(n, e.cache, e.heartbeat if e.is_connected else None, e.heartbeat_time) for n, e in enumerate(client.engines)
    ]
    response.send(200, metrics_text(services.metrics, client.welcome, engines), CONTENT_TYPE)
