"""OLLAMA_ROUTES: the routes below /api, which the table of all routes (../routes.py) includes.

A body may have any content type, or none, since `curl -d` and Ollama's clients send them so.
"""

import functools
from typing import Any

from quire.frontend.http.api.ollama import create, embed, models
from quire.frontend.http.api.ollama.errors import OllamaErrorResponse
from quire.frontend.http.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    ShowRequest,
)
from quire.frontend.http.api.route import Route
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request, Response

_Route = functools.partial(Route, tag="ollama", error=OllamaErrorResponse, any_type=True, stream_type=create.NDJSON.decode())
_MODELS = (
    "This server manages no models: it serves the one that it was started with. Start another server with `quire serve MODEL`."
)
_OPTIONS = {"num_predict": 32}


async def _nothing(services: Services, request: Request, response: Response) -> None:
    """The handler of a missing route; app.py answers before it is called."""


def _missing(method: str, path: str, text: str) -> Any:
    return _Route(method, path, _nothing, "Not here, answers 501", missing=text)


OLLAMA_ROUTES: tuple[Route, ...] = (
    _Route(
        "POST",
        "/api/chat",
        create.chat,
        "Answer a conversation, as Ollama does; streams unless stream is false",
        body=OllamaChatRequest,
        answer=OllamaChatResponse,
        streams=True,
        prompt_field="messages",
        has_media=True,
        example={"messages": [{"role": "user", "content": "Hello!"}], "stream": False, "options": _OPTIONS},
    ),
    _Route(
        "POST",
        "/api/generate",
        create.generate,
        "Answer a prompt, as Ollama does; streams unless stream is false",
        body=OllamaGenerateRequest,
        answer=OllamaGenerateResponse,
        streams=True,
        prompt_field="prompt",
        has_media=True,
        example={"prompt": "Hello!", "stream": False, "options": _OPTIONS},
    ),
    _Route(
        "POST",
        "/api/show",
        models.show,
        "The context, template and capabilities of a model",
        body=ShowRequest,
        answer=dict[str, Any],
        example={},
    ),
    _Route("GET", "/api/tags", models.tags, "The models that are served", answer=dict[str, Any]),
    _Route("GET", "/api/ps", models.ps, "The same, which are loaded at all times", answer=dict[str, Any]),
    _Route("GET", "/api/version", models.version, "The version of Ollama's API", answer=dict[str, Any]),
    _Route(
        "POST",
        "/api/embed",
        embed.embed,
        "Vectors of texts, as Ollama has them",
        body=embed.OllamaEmbedRequest,
        answer=embed.OllamaEmbedResponse,
        prompt_field="input",
        example={"input": ["A set of pages."]},
    ),
    _Route(
        "POST",
        "/api/embeddings",
        embed.embeddings,
        "The vector of one text: Ollama's older route",
        body=embed.OllamaEmbeddingsRequest,
        answer=embed.OllamaEmbeddingsResponse,
        prompt_field="prompt",
        example={"prompt": "A set of pages."},
    ),
    *(_missing("POST", f"/api/{what}", _MODELS) for what in ("pull", "push", "create", "copy")),
    _missing("DELETE", "/api/delete", _MODELS),
    *(_missing(method, "/api/blobs/{digest}", _MODELS) for method in ("GET", "POST")),
)
