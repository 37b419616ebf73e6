"""/v1/models, /version, /metrics, and browsers' preflights."""

from quire.frontend.http.api.bodies.schemas import ModelCard, ModelList, ModelPermission, VersionResponse
from quire.frontend.http.api.metrics.metrics_text import CONTENT_TYPE, EngineState, metrics_text
from quire.frontend.http.api.models import check_model
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response


async def list_models(services: Services, request: Request, response: Response) -> None:
    names = [*services.model_names, *services.client.adapters]
    cards = [_card(services, request, name) for name in names if services.key_limits.may_use(request.owner, name)]
    response.send(200, json_bytes(ModelList(data=cards)))


async def one_model(services: Services, request: Request, response: Response) -> None:
    """GET /v1/models/{model}: an id may contain slashes, plain or percent-encoded."""
    name = await check_model(services, request, request.path_parameters["model"])
    response.send(200, json_bytes(_card(services, request, name)))


def _card(services: Services, request: Request, name: str) -> ModelCard:
    """An adapter's root is its folder, for those who may know it."""
    welcome, adapter = services.client.welcome, services.client.adapters.get(name)
    first, media = welcome.served_model_names[0], welcome.limits.media
    kinds = media.kinds if media is not None and services.client.media is not None else []
    return ModelCard(
        id=name,
        created=welcome.created if adapter is None else int(adapter.loaded_at) or welcome.created,
        root=first if adapter is None else adapter.file.folder if request.is_admin else name,
        parent=None if adapter is None else first,
        max_model_len=welcome.limits.max_model_len,
        input_modalities=["text", *kinds],
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
