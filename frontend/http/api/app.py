"""The application behind the protocol: who may ask, which route answers, and what becomes of an error.

Deny by default: with API keys configured, every path but the open ones needs one, decided on the raw bytes of the path, before
routing and before a body is read; only a browser's preflight, which does nothing, cannot bring one. Routing is one dictionary;
each route is a function of a file of its own, which gets `Services` and knows nothing of this one. Whatever it raises becomes
OpenAI's error JSON here, or the last event of a stream that has begun.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from quire.frontend.http.api import batches, files, service_routes
from quire.frontend.http.api.chat import chat_completions
from quire.frontend.http.api.completions import completions
from quire.frontend.http.api.errors import from_exception
from quire.frontend.http.api.near_path import near_path
from quire.frontend.http.api.request_log import given_id
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import error_event
from quire.frontend.http.protocol.cors import Cors, is_preflight
from quire.frontend.http.protocol.errors import ApiError, internal_error, shutting_down
from quire.frontend.http.protocol.exchange import Request, Response, ResponseState
from quire.frontend.http.store.bounds import MAX_FORM_BYTES

logger = logging.getLogger("quire.http")

_MAX_BODY_OF_GET = 64 << 10
_JSON, _FORM = b"application/json", b"multipart/form-data"

Handler = Callable[[Services, Request, Response], Awaitable[None]]


class Route(NamedTuple):
    name: str  # the metrics' label
    method: str
    handler: Handler
    prompt_field: str | None = None  # what to name when a prompt is too long
    media_type: bytes = _JSON  # of the body
    max_body: int | None = None  # None: the server's
    others: "tuple[Route, ...]" = ()  # other methods at the same path


ROUTES: dict[bytes, Route] = {
    b"/v1/chat/completions": Route("/v1/chat/completions", "POST", chat_completions, "messages"),
    b"/v1/completions": Route("/v1/completions", "POST", completions, "prompt"),
    b"/v1/models": Route("/v1/models", "GET", service_routes.list_models),
    b"/tokenize": Route("/tokenize", "POST", service_routes.tokenize),
    b"/detokenize": Route("/detokenize", "POST", service_routes.detokenize),
    b"/health": Route("/health", "GET", service_routes.health),
    b"/ping": Route("/ping", "GET", service_routes.health),
    b"/version": Route("/version", "GET", service_routes.version),
    b"/metrics": Route("/metrics", "GET", service_routes.metrics),
    b"/v1/files": Route(
        "/v1/files", "POST", files.upload_file, media_type=_FORM, max_body=MAX_FORM_BYTES,
        others=(Route("/v1/files", "GET", files.list_files),),
    ),
    b"/v1/batches": Route(
        "/v1/batches", "POST", batches.create_batch, others=(Route("/v1/batches", "GET", batches.list_batches),)
    ),
}  # fmt: skip
_PREFIXES: dict[bytes, Route] = {
    b"/v1/models/": Route("/v1/models", "GET", service_routes.one_model),
    files.PREFIX: Route(
        "/v1/files", "GET", files.read_file, others=(Route("/v1/files", "DELETE", files.delete_file),)
    ),
    batches.PREFIX: Route(
        "/v1/batches", "GET", batches.one_batch, others=(Route("/v1/batches", "POST", batches.cancel_batch),)
    ),
}  # fmt: skip
_PREFLIGHT = Route("other", "OPTIONS", service_routes.preflight)


class App:
    """One frontend process's application. api_keys: none means open to all. allowed_origins: see cors.py."""

    def __init__(
        self,
        services: Services,
        *,
        api_keys: Iterable[str] = (),
        metrics_open: bool = False,
        allowed_origins: Iterable[str] = ("*",),
    ) -> None:
        self._services = services
        self._metrics = services.metrics
        self._cors = Cors(allowed_origins)
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._open_paths = {b"/health", b"/ping", b"/metrics"} if metrics_open else {b"/health", b"/ping"}

    # ------------------------------------------------------------------------------------------------ before the body
    def admit(self, request: Request) -> ApiError | None:
        request.answer_headers = self._cors.headers(request.headers)
        if given := given_id(request.headers):
            request.answer_headers += b"x-request-id: %b\r\n" % given
        error = self._admit(request)
        if error is not None:
            route = request.route
            self._metrics.count_http(route.name if isinstance(route, Route) else "other", error.status)
        return error

    def _admit(self, request: Request) -> ApiError | None:
        if is_preflight(request):
            request.route = _PREFLIGHT
            request.max_body = min(request.max_body, _MAX_BODY_OF_GET)
            return None
        if self._key_digests and request.path not in self._open_paths and not self._has_key(request):
            return ApiError(401, "A valid API key is needed: 'Authorization: Bearer KEY'.", code="invalid_api_key")
        route = ROUTES.get(bytes(request.path))
        if route is None:
            route = next((route for prefix, route in _PREFIXES.items() if request.path.startswith(prefix)), None)
        if route is None:
            meant = near_path(request.path, ROUTES)
            hint = f" Did you mean {meant}?" if meant else ""
            return ApiError(404, f"There is no such path here.{hint}", code="not_found")
        request.route, allow = route, [method for each in (route, *route.others) for method in _methods(each)]
        if request.method not in allow:
            return ApiError(405, f"This path takes {' or '.join(allow)}.", code="method_not_allowed", allow=allow)
        request.route = route = next(each for each in (route, *route.others) if request.method in _methods(each))
        if route.method in ("GET", "DELETE"):
            request.max_body = min(request.max_body, _MAX_BODY_OF_GET)
            return None
        request.max_body = route.max_body or request.max_body
        if route.media_type != _JSON and not self._cors.lets_in(request.headers):
            return ApiError(403, "A page of this origin may not use this server.", code="origin_not_allowed")
        return _check_media_type(request, route.media_type)

    def _has_key(self, request: Request) -> bool:
        """Compares with every key, in constant time, so that neither a near miss nor its place in the list shows."""
        scheme, _, key = request.headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        found = False
        for digest in self._key_digests:
            found |= hmac.compare_digest(given, digest)
        request.owner = given.hex()
        return found and scheme.lower() == b"bearer"

    # ------------------------------------------------------------------------------------------------------- answering
    async def handle(self, request: Request, response: Response) -> None:
        route = request.route
        assert isinstance(route, Route)
        try:
            await route.handler(self._services, request, response)
        except asyncio.CancelledError:
            if not response.client_gone:
                _tell(response, shutting_down())
            raise
        except Exception as error:
            known = from_exception(error, route.prompt_field)
            if known is None:
                logger.exception("%s failed", route.name)
            _tell(response, known or internal_error())
        finally:
            if response.status:
                self._metrics.count_http(route.name, response.status)


def _tell(response: Response, error: ApiError) -> None:
    if response.state is ResponseState.WAITING:
        response.send_error(error)
    elif response.state is ResponseState.STREAMING and not response.is_sized:
        response.end(error_event(error))


def _methods(route: Route) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


def _check_media_type(request: Request, wanted: bytes) -> ApiError | None:
    """A browser sends other types across origins unasked, but not JSON."""
    media_type = request.headers.get(b"content-type", _JSON).partition(b";")[0].strip().lower()
    if media_type != wanted:
        return ApiError(415, f"The header content-type must be {wanted.decode()}.", code="unsupported_media_type")
    if request.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        return ApiError(415, "A compressed body is not understood.", code="unsupported_media_type")
    return None
