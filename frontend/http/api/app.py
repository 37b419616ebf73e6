"""The application behind the protocol: checks access, finds the route, calls its handler, and turns exceptions into answers.

Access is decided by access.py on the raw bytes of the head, before routing and before a body is read. Only a browser's
preflight, which does nothing, needs no key. The table of paths, and which of them are open, is routes.py; a handler is a
function in another file that gets `Services` and does not know this file. An exception of a handler becomes JSON here, or the
last event of a stream that has begun.
"""

import asyncio
import copy
import dataclasses
import logging
import time
from collections.abc import Callable

from quire.frontend.client.stream import Overloaded, RateLimited
from quire.frontend.client.turns import in_native_thread, in_thread
from quire.frontend.http.api.access import Access, access_of
from quire.frontend.http.api.bodies.body_shape import WEIGHED_BYTES, check_shape
from quire.frontend.http.api.bodies.cut_strings import cut_images
from quire.frontend.http.api.errors import from_exception
from quire.frontend.http.api.logs.access_log import AccessLog
from quire.frontend.http.api.logs.request_log import given_id, name_request
from quire.frontend.http.api.messages.errors import PATH as ANTHROPIC
from quire.frontend.http.api.messages.errors import speak_anthropic
from quire.frontend.http.api.metrics.metric_names import REFUSALS
from quire.frontend.http.api.metrics.metrics import NO_HANDLER
from quire.frontend.http.api.near_path import near_path
from quire.frontend.http.api.ollama.errors import OllamaError, is_ollamas
from quire.frontend.http.api.pooling.fields import need_generation
from quire.frontend.http.api.route import JSON, Route
from quire.frontend.http.api.routes import DESCRIPTIONS, PREFLIGHT, ROUTES, TO_PAGE
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.sse import error_event
from quire.frontend.http.protocol.cors import EVERYONE, Cors, is_preflight
from quire.frontend.http.protocol.errors import ApiError, internal_error, shutting_down
from quire.frontend.http.protocol.exchange import Request, Response, ResponseState

logger = logging.getLogger("quire.http")

_MAX_BODY_OF_GET = 64 << 10
_NO_PATH = "There is no such path here."


class App:
    """One frontend process's application. access: None lets everyone in. request_ids: every answer has an X-Request-Id.
    on_served: called once, after the first answer that was no probe's."""

    def __init__(
        self,
        services: Services,
        *,
        access: Access | None = None,
        cors: Cors = EVERYONE,
        access_log: AccessLog | None = None,
        request_ids: bool = False,
        root_path: str = "",
        has_docs: bool = True,
        on_served: Callable[[], None] | None = None,
    ) -> None:
        """root_path: a prefix that paths may have, from a proxy that keeps it. has_docs: serve /docs and /openapi.json."""
        self._root_path = root_path.encode()
        self._services = dataclasses.replace(services, root_path=root_path) if root_path else services
        self._metrics = services.metrics
        self._metrics.register_handlers(route.name for route in ROUTES.routes)
        self._cors = cors
        self._access_log = access_log
        self._request_ids = request_ids
        self._access = access or access_of()
        self._left_out = () if has_docs else DESCRIPTIONS
        self._on_served = on_served

    def bounded(self, max_response_bytes: int) -> "App":
        """The same application with a lower limit for answers in one piece, for a caller that holds them in memory."""
        app = copy.copy(self)
        most = min(max_response_bytes, self._services.max_response_bytes)
        app._services = dataclasses.replace(self._services, max_response_bytes=most)
        return app

    @property
    def takes_media(self) -> bool:
        """Whether messages may hold images."""
        return self._services.client.media is not None

    # ------------------------------------------------------------------------------------------------ before the body
    def admit(self, request: Request) -> ApiError | None:
        request.answer_headers = self._cors.headers(request)
        if self._request_ids:
            name_request(request.headers)
        if given := given_id(request.headers):
            request.answer_headers += b"x-request-id: %b\r\n" % given
        error = self._admit(request)
        if error is not None:
            route = request.route
            name = route.name if isinstance(route, Route) else NO_HANDLER
            self._metrics.count_http(name, request.method, error.status, 0.0)
            if self._access_log is not None:
                self._access_log.add(request, error.status)
        return error

    def _admit(self, request: Request) -> ApiError | None:
        if self._root_path:
            if request.path == self._root_path and request.method in ("GET", "HEAD"):
                request.route = TO_PAGE
                request.max_body = min(request.max_body, _MAX_BODY_OF_GET)
                return None
            request.path = without_root(request.path, self._root_path)
        if request.path.startswith(ANTHROPIC):
            speak_anthropic(request)
        elif is_ollamas(request.path):
            request.error_as = OllamaError
        if refusal := self._access.host_refusal(request):
            return refusal
        if is_preflight(request):
            request.route = PREFLIGHT
            request.max_body = min(request.max_body, _MAX_BODY_OF_GET)
            return None
        if refusal := self._access.refusal(request):
            return refusal
        if request.path in self._left_out:
            return ApiError(404, _NO_PATH, code="not_found")
        methods, request.path_parameters = ROUTES.find(bytes(request.path))
        if not methods:
            return _no_such_path(request.path)
        route = methods.get("GET" if request.method == "HEAD" and "GET" in methods else request.method)
        if route is None:
            request.route = next(iter(methods.values()))
            allow = [*methods, *(["HEAD"] if "GET" in methods else [])]
            return ApiError(405, f"This path takes {' or '.join(allow)}.", code="method_not_allowed", allow=allow)
        request.route, request.is_open = route, route.is_open
        if refusal := self._access.admin_refusal(request, route):
            return refusal
        if route.missing:
            return ApiError(501, route.missing, code="not_implemented")
        if route.method in ("GET", "DELETE"):
            request.max_body = min(request.max_body, _MAX_BODY_OF_GET)
            return None
        request.max_body = route.max_body or request.max_body
        if route.has_media and (media := self._services.client.media) is not None:
            request.max_body = max(request.max_body, media.options.max_body_bytes)
        reads_json = route.media_type == JSON and route.body is not None and not route.any_type
        # A browser sends a preflight before JSON across origins, but sends forms and bodies without a type directly.
        if not (reads_json and b"content-type" in request.headers) and not self._cors.allows(request.headers):
            return ApiError(403, "A page of this origin may not use this server.", code="origin_not_allowed")
        # The type does not matter where no body is read: aiohttp announces bytes even if it sends none.
        return _check_media_type(request, route.media_type) if reads_json or route.media_type != JSON else None

    # ------------------------------------------------------------------------------------------------------- answering
    async def handle(self, request: Request, response: Response) -> None:
        route = request.route
        assert isinstance(route, Route)
        began = time.perf_counter()
        try:
            if len(request.body) >= WEIGHED_BYTES and route.has_media and self._services.client.media is not None:
                request.body, request.cut_out = await in_native_thread(cut_images, request.body)
            if len(request.body) >= WEIGHED_BYTES and route.media_type == JSON:
                await in_thread(check_shape, bytes(request.body))
            if route.generates:
                need_generation(self._services)
            await route.handler(self._services, request, response)
        except asyncio.CancelledError:
            if not response.client_gone:
                _send_error(response, shutting_down())
            raise
        except BaseException as error:  # a panic in Rust (tokenizers) is no Exception; it fails only this request
            is_refusal = isinstance(error, Overloaded | RateLimited) and not request.is_patient
            # no variable for the ApiError: its traceback refers to this frame, a cycle
            self._fail(request, response, _as_api_error(error, route), is_refusal)
        finally:
            if response.status:
                if self._on_served is not None and not route.is_open:
                    on_served, self._on_served = self._on_served, None
                    on_served()
                self._metrics.count_http(route.name, request.method, response.status, time.perf_counter() - began)
            if self._access_log is not None:
                self._access_log.add(request, response.status, time.perf_counter() - began)

    def _fail(self, request: Request, response: Response, error: ApiError, is_refusal: bool) -> None:
        if is_refusal:
            self._services.refusals.note(request.owner, error)
        if error.code in REFUSALS and not request.is_patient:  # a patient one is sent again
            self._metrics.count("requests_refused", error.code)
        _send_error(response, error)


def _as_api_error(error: BaseException, route: Route) -> ApiError:
    known = from_exception(error, route.prompt_field)
    if known is None:
        logger.exception("%s failed", route.name)
    return known or internal_error()


def _send_error(response: Response, error: ApiError) -> None:
    if response.state is ResponseState.WAITING:
        response.send_error(error)
    elif response.state is ResponseState.STREAMING and not response.is_sized:
        response.end(error_event(response.error_for_client(error)))


def without_root(path: bytes, root_path: bytes) -> bytes:
    """A path without the root path, if its first segments are that."""
    return path[len(root_path) :] if root_path and path.startswith(root_path + b"/") else path


def _no_such_path(path: bytes) -> ApiError:
    meant = near_path(path, ROUTES.paths)
    return ApiError(404, f"{_NO_PATH}{f' Did you mean {meant}?' if meant else ''}", code="not_found")


def _check_media_type(request: Request, media_type: str) -> ApiError | None:
    """Refuse other types, which browsers send across origins without a preflight."""
    given = request.headers.get(b"content-type")
    if given is not None and given.partition(b";")[0].strip().lower() != media_type.encode():
        return ApiError(415, f"The header content-type must be {media_type}.", code="unsupported_media_type")
    coding = request.headers.get(b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        return ApiError(415, "A compressed body is not understood.", code="unsupported_media_type")
    return None
