"""ROUTES: every route of the server, one line each. A new route needs a line here, and nothing else.

app.py serves them, and asks for a key unless a route `is_open`; openapi.py describes them.
"""

import asyncio
import functools
from typing import Any

from quire.frontend.http.api import adapter_routes, admin_routes, batches, files, health_routes, service_routes, tokenize_routes
from quire.frontend.http.api.bodies.pages import PAGE_FIELDS
from quire.frontend.http.api.bodies.schemas import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    PrefixCacheReset,
    ProfileAnswer,
    ServerInfoAnswer,
    ServerLoad,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from quire.frontend.http.api.chat import chat_completions
from quire.frontend.http.api.completions import completions
from quire.frontend.http.api.messages.create import count_tokens, create_message
from quire.frontend.http.api.messages.errors import MessagesErrorResponse
from quire.frontend.http.api.messages.schemas import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
)
from quire.frontend.http.api.metrics.metrics import NO_HANDLER
from quire.frontend.http.api.ollama.routes import OLLAMA_ROUTES
from quire.frontend.http.api.openapi import document
from quire.frontend.http.api.page import FILES, page, to_page
from quire.frontend.http.api.pooling.routes import POOLING_ROUTES
from quire.frontend.http.api.responses import stored
from quire.frontend.http.api.responses.answer import ResponseObject
from quire.frontend.http.api.responses.create import InputTokens, count_input_tokens, create_response
from quire.frontend.http.api.responses.request import ResponsesRequest
from quire.frontend.http.api.route import Route, RouteTable
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.api.static_page import StaticPage
from quire.frontend.http.api.token_generate import GenerateRequest, GenerateResponse, generate
from quire.frontend.http.batches.record import Batch
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.store.bounds import MAX_FORM_BYTES


@functools.cache
def _document(root_path: str) -> bytes:
    return json_bytes(document(ROUTES.routes, root_path))


async def openapi(services: Services, request: Request, response: Response) -> None:
    response.send(200, await asyncio.to_thread(_document, services.root_path))  # the first call takes a while


async def _nothing(services: Services, request: Request, response: Response) -> None:
    """The handler of a missing route; app.py answers before it is called."""


def _missing(path: str, what: str, tag: str, media_type: str = "application/json") -> Route:
    text = f"{what} are not supported by this server yet: it serves models that generate text, see /v1/chat/completions."
    return Route("POST", path, _nothing, f"{what}: not here yet, answers 501", tag, media_type=media_type, missing=text)


def _page_file(path: str, content_type: str) -> Route:
    return Route("GET", path, page, "A file of the page at /", answer_type=content_type.partition(";")[0], is_open=True)


_HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}

ROUTES = RouteTable(
    [
        Route("POST", "/v1/chat/completions", chat_completions, "Answer a conversation", "generate", ChatRequest, ChatResponse,
              streams=True, example=_HELLO, prompt_field="messages", has_media=True),
        Route("POST", "/v1/completions", completions, "Continue a text", "generate", CompletionRequest, CompletionResponse,
              streams=True, example={"prompt": "Once upon a time", "max_tokens": 32}, prompt_field="prompt"),
        Route("POST", "/v1/responses", create_response, "Answer a conversation, of items; keep the answer", "responses",
              ResponsesRequest, ResponseObject, streams=True, example={"input": "Hello!", "max_output_tokens": 32},
              prompt_field="input", has_media=True),
        Route("POST", "/v1/responses/input_tokens", count_input_tokens, "How long the prompt of such a body is", "responses",
              ResponsesRequest, InputTokens, example={"input": "Hello!"}, prompt_field="input", has_media=True),
        Route("GET", "/v1/responses/{response_id}", stored.read_response, "A response that was kept", "responses",
              answer=ResponseObject),
        Route("DELETE", "/v1/responses/{response_id}", stored.delete_response, "Delete it", "responses",
              answer=dict[str, Any]),
        Route("POST", "/v1/responses/{response_id}/cancel", stored.cancel_response, "Give up one that runs in the background",
              "responses", answer=ResponseObject),
        Route("GET", "/v1/responses/{response_id}/input_items", stored.list_input_items, "The items that the model was shown",
              "responses", answer=dict[str, Any], query=PAGE_FIELDS),
        Route("POST", "/inference/v1/generate", generate, "Continue token ids", "generate", GenerateRequest, GenerateResponse,
              streams=True, example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32}}, prompt_field="token_ids"),
        Route("POST", "/v1/messages", create_message, "Answer a conversation, as Anthropic's API does", "generate",
              MessagesRequest, MessagesResponse, streams=True, example=_HELLO, prompt_field="messages",
              error=MessagesErrorResponse, has_media=True),
        Route("POST", "/v1/messages/count_tokens", count_tokens, "How many tokens such a conversation has", "tokens",
              CountTokensRequest, CountTokensResponse, example={"messages": _HELLO["messages"]},
              prompt_field="messages", error=MessagesErrorResponse, has_media=True),
        *POOLING_ROUTES,
        *OLLAMA_ROUTES,
        Route("GET", "/v1/models", service_routes.list_models, "The models that are served", "models", answer=ModelList),
        Route("GET", "/v1/models/{model:path}", service_routes.one_model, "One of them", "models", answer=ModelCard),
        Route("POST", "/v1/files", files.upload_file, "Upload the input of a batch: a form with purpose and file", "batches",
              answer=files.FileObject, media_type="multipart/form-data", form=files.UPLOAD_FIELDS, max_body=MAX_FORM_BYTES),
        Route("GET", "/v1/files", files.list_files, "Your files", "batches", answer=dict[str, Any], query=PAGE_FIELDS),
        Route("GET", "/v1/files/{file_id}", files.read_file, "One of them", "batches", answer=files.FileObject),
        Route("GET", "/v1/files/{file_id}/content", files.read_file, "Its content", "batches",
              answer_type="application/octet-stream"),
        Route("DELETE", "/v1/files/{file_id}", files.delete_file, "Delete it", "batches", answer=dict[str, Any]),
        Route("POST", "/v1/batches", batches.create_batch, "Answer a file of requests, in time", "batches",
              batches.BatchRequest, Batch),
        Route("GET", "/v1/batches", batches.list_batches, "Your batches", "batches", answer=dict[str, Any], query=PAGE_FIELDS),
        Route("GET", "/v1/batches/{batch_id}", batches.one_batch, "One of them", "batches", answer=Batch),
        Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Give up what is not answered", "batches",
              answer=Batch),
        Route("POST", "/tokenize", tokenize_routes.tokenize, "Token ids of a text or a conversation", "tokens",
              TokenizeRequest, TokenizeResponse, example={"prompt": "Hello!"}, prompt_field="prompt", has_media=True),
        Route("POST", "/detokenize", tokenize_routes.detokenize, "The text of token ids", "tokens",
              DetokenizeRequest, DetokenizeResponse, example={"tokens": [1, 2, 3]}),
        Route("GET", "/tokenizer_info", tokenize_routes.tokenizer_info, "The tokenizer's configuration", "tokens",
              answer=dict[str, Any]),
        Route("GET", "/health", health_routes.health, "Whether the engine is well", is_open=True),
        Route("GET", "/live", health_routes.live, "Whether this process answers", is_open=True),
        Route("GET", "/ready", health_routes.ready, "Whether requests are welcome", is_open=True),
        Route("GET", "/ping", health_routes.health, "As /health", is_open=True),
        Route("POST", "/ping", health_routes.health, "As /health", is_open=True),
        Route("GET", "/load", health_routes.load, "Requests that this process works on", answer=ServerLoad),
        Route("GET", "/version", service_routes.version, "The engine's version", answer=VersionResponse),
        Route("GET", "/metrics", service_routes.metrics, "Numbers for Prometheus", answer_type="text/plain", is_admin=True),
        Route("GET", "/server_info", admin_routes.server_info, "The engine's configuration", "admin", answer=ServerInfoAnswer,
              query={"config_format": {"type": "string", "enum": ["text", "json"], "default": "text"}}, is_admin=True),
        Route("POST", "/reset_prefix_cache", admin_routes.reset_prefix_cache, "Forget cached prefixes", "admin",
              answer=PrefixCacheReset, is_admin=True),
        Route("POST", "/start_profile", admin_routes.start_profile, "Begin to record what the workers do", "admin",
              answer=ProfileAnswer, is_admin=True),
        Route("POST", "/stop_profile", admin_routes.stop_profile, "Write traces of it", "admin", answer=ProfileAnswer,
              is_admin=True),
        Route("POST", "/v1/load_lora_adapter", adapter_routes.load_lora_adapter, "Load a LoRA adapter", "admin",
              adapter_routes.LoadLoRAAdapterRequest, answer_type="text/plain", is_admin=True,
              example={"lora_name": "sql", "lora_path": "/adapters/sql"}),
        Route("POST", "/v1/unload_lora_adapter", adapter_routes.unload_lora_adapter, "Unload it", "admin",
              adapter_routes.UnloadLoRAAdapterRequest, answer_type="text/plain", is_admin=True,
              example={"lora_name": "sql"}),
        Route("GET", "/openapi.json", openapi, "This description", answer=dict[str, Any]),
        Route("GET", "/docs", StaticPage("docs.html"), "This description, to be read", answer_type="text/html", is_open=True),
        *(_page_file(path.decode(), file.content_type.decode()) for path, file in FILES.items()),
        _missing("/v1/audio/speech", "Spoken answers", "audio"),
        _missing("/v1/audio/transcriptions", "Transcriptions", "audio", "multipart/form-data"),
        _missing("/v1/audio/translations", "Translations", "audio", "multipart/form-data"),
    ]
)  # fmt: skip
TO_PAGE = Route("GET", NO_HANDLER, to_page, "The root path, without the slash that the page needs")
DESCRIPTIONS = (b"/openapi.json", b"/docs")
PREFLIGHT = Route("OPTIONS", NO_HANDLER, service_routes.preflight, "A browser's question before a page's request")
