"""GET /api/version, /api/tags and /api/ps, and POST /api/show: the served model, as Ollama describes its own.

A frontend knows the names, the context and the chat template; sizes and quantization are left empty.
"""

from typing import Any

from quire.frontend.http.api.bodies.body import BodyDecoder, read_body
from quire.frontend.http.api.ollama.answer import moment
from quire.frontend.http.api.ollama.request import model_of
from quire.frontend.http.api.ollama.schemas import ShowRequest
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Request, Response

OLLAMA_VERSION = "0.12.6"  # the API that these routes follow; editors refuse servers of versions that are too old for them
_NEVER = "9999-12-31T23:59:59Z"
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "quire",
    "families": ["quire"],
    "parameter_size": "",
    "quantization_level": "",
}

_show_decoder = BodyDecoder(ShowRequest)


async def version(services: Services, request: Request, response: Response) -> None:
    response.send(200, json_bytes({"version": OLLAMA_VERSION}))


async def tags(services: Services, request: Request, response: Response) -> None:
    response.send(200, json_bytes(_models(services, request, modified_at=moment(services.client.welcome.created))))


async def ps(services: Services, request: Request, response: Response) -> None:
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": services.limits.max_model_len}
    response.send(200, json_bytes(_models(services, request, **more)))


def _models(services: Services, request: Request, **more: Any) -> dict[str, Any]:
    names = [*services.model_names, *services.client.adapters]
    names = [name for name in names if services.key_limits.may_use(request.owner, name)]
    same = {"size": 0, "digest": services.client.welcome.model_digest, "details": _DETAILS, **more}
    return {"models": [{"name": name, "model": name, **same} for name in names]}


async def show(services: Services, request: Request, response: Response) -> None:
    body = await read_body(_show_decoder, request, services.unknown_fields)
    name = await model_of(services, request, body.model or body.name)
    tokenizer, parsers = services.client.tokenizer, services.parsers
    template = tokenizer.template_source() if "default" in tokenizer.templates else ""
    harmony = parsers.is_harmony(template)
    capabilities = {
        "completion": True,
        "vision": services.client.media is not None,
        "tools": harmony or parsers.tool_parser(template) is not None,
        "thinking": harmony or parsers.reasoning_parser(template) is not None,
    }
    info = {
        "general.architecture": "quire",
        "general.basename": name,
        "quire.context_length": services.limits.max_model_len,
        "quire.vocab_size": services.limits.vocab_size,
    }
    answer = {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _DETAILS,
        "model_info": info,
        "capabilities": [what for what, has in capabilities.items() if has],
        "modified_at": moment(services.client.welcome.created),
    }
    response.send(200, json_bytes(answer))
