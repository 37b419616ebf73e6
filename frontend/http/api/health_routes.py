"""Probes for orchestrators, load balancers and people: is the process alive, does it accept requests, how busy is it.

/live: the event loop answers, whatever the engine does. /ready: new requests are accepted; they are not while the engine starts
or is unhealthy, and after the server was told to stop. /health, /ping: the engine is healthy.
"""

from quire.frontend.http.api.bodies.schemas import ServerLoad
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.errors import ApiError, shutting_down
from quire.frontend.http.protocol.exchange import Request, Response


async def live(services: Services, request: Request, response: Response) -> None:
    response.send(200)


async def ready(services: Services, request: Request, response: Response) -> None:
    if services.state.draining:
        raise shutting_down()
    await health(services, request, response)


async def health(services: Services, request: Request, response: Response) -> None:
    """Status 200 while the core sends heartbeats and no step is stuck."""
    problem = services.client.health()
    if problem is not None:
        raise ApiError(503, problem, code="unhealthy", retry_after_s=2)
    response.send(200)


async def load(services: Services, request: Request, response: Response) -> None:
    """The number of requests (prompts) that this process works on."""
    response.send(200, json_bytes(ServerLoad(services.client.num_requests)))
