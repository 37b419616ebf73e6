"""Routes for the operator: record profiles, empty the prefix cache, show the engine's configuration. Names are vLLM's.

Each route makes one call of ipc/messages/utilities.py. If the server was not started for it, the engine's refusal says so.
"""

import asyncio
import os
import platform
from urllib.parse import parse_qs

from quire.frontend.http.api.bodies.schemas import PrefixCacheReset, ProfileAnswer, ServerInfoAnswer
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response
from quire.ipc.messages.utilities import (
    GetServerInfo,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    ServerInfo,
    StartProfile,
    StopProfile,
)

_TRUE = ("true", "1", "yes", "on")


async def start_profile(services: Services, request: Request, response: Response) -> None:
    await services.client.utility(StartProfile(), ProfileDone)
    response.send(200, json_bytes(ProfileAnswer([])))


async def stop_profile(services: Services, request: Request, response: Response) -> None:
    done = await services.client.utility(StopProfile(), ProfileDone)
    response.send(200, json_bytes(ProfileAnswer(done.traces)))


async def reset_prefix_cache(services: Services, request: Request, response: Response) -> None:
    for name in ("reset_running_requests", "reset_external"):
        if _query(request, name).lower() in _TRUE:
            raise invalid(f"{name}: this value is not supported by this server; requests that run keep their blocks", name)
    done = await services.client.utility(ResetPrefixCache(), ResetDone)
    response.send(200, json_bytes(PrefixCacheReset(done.complete)))


async def server_info(services: Services, request: Request, response: Response) -> None:
    """The configuration in vLLM's shape: as text, or with ?config_format=json as an object."""
    wanted = _query(request, "config_format") or "text"
    if wanted not in ("text", "json"):
        raise invalid("config_format must be text or json", "config_format")
    info = await services.client.utility(GetServerInfo(), ServerInfo)
    config = info.config if wanted == "json" else ", ".join(f"{name}={value!r}" for name, value in info.config.items())
    system = await asyncio.to_thread(_system)  # it reads files
    response.send(200, json_bytes(ServerInfoAnswer(config, {}, system)))


def _system() -> dict[str, str]:
    return {"os": platform.platform(), "python_version": platform.python_version(), "cpu_count": str(os.cpu_count())}


def _query(request: Request, name: str) -> str:
    """The last value of a query parameter; "" if it is absent."""
    return parse_qs(request.query.decode("latin-1"), keep_blank_values=True).get(name, [""])[-1]
