"""Access: which requests may come in, decided on their heads, before routing and before a body is read.

Deny by default: with API keys, every path except the open ones needs a key. Routes for the operator (`Route.is_admin`) need an
admin key where there is one. The header host must name this server where names are restricted: a web page on a name that its
owner lets point to this machine (DNS rebinding) sends that name, and a browser takes the page and this server for one origin.
IP addresses always pass, because rebinding needs a name, and because probes use them.
"""

import ipaddress
import re
from collections.abc import Iterable

from quire.frontend.http.api.keys import ApiKeys
from quire.frontend.http.api.route import Route
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.limits.key_limits import KeyLimits
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request

# A page from elsewhere has a name with a dot: only the owner of a local network can let another name point to this machine.
LOCAL_NAMES = ("localhost", "*.localhost", "*.")
_AUTHORITY = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)
_PORT = re.compile(r":\d*$")
_MOST_KNOWN, _LONGEST_NAME = 1024, 256  # names with a kept verdict


def access_of(
    *,
    api_keys: Iterable[str] = (),
    admin_keys: Iterable[str] = (),
    key_limits: KeyLimits | None = None,
    metrics_open: bool = False,
    allowed_hosts: Iterable[str] = ("*",),
) -> "Access":
    """The access to all routes of the server. metrics_open: /metrics needs no key."""
    paths = {route.path for route in ROUTES.routes if route.is_open}
    open_paths = [*(path.encode() for path in paths), *([b"/metrics"] if metrics_open else [])]
    closed = [(route.method, route.path.encode()) for route in ROUTES.routes if route.path in paths and not route.is_open]
    keys = ApiKeys(api_keys, admin_keys, key_limits)
    return Access(keys, open_paths=open_paths, closed=closed, allowed_hosts=allowed_hosts)


class Access:
    """open_paths: need no key, but for the methods in `closed`. allowed_hosts: names, "*.example.org" for all below one, "*."
    for names without a dot, "*" for all."""

    def __init__(
        self,
        keys: ApiKeys | None = None,
        *,
        open_paths: Iterable[bytes] = (),
        closed: Iterable[tuple[str, bytes]] = (),
        allowed_hosts: Iterable[str] = ("*",),
    ) -> None:
        self._keys = keys or ApiKeys()
        self._open_paths, self._closed = frozenset(open_paths), frozenset(closed)
        names = [name.lower().rstrip(".") for name in allowed_hosts]
        self._allows_all = "*" in allowed_hosts
        self._allows_words = "*." in allowed_hosts
        self._names = frozenset(name for name in names if not name.startswith("*"))
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._known: dict[bytes, bool] = {}

    def use(self, keys: ApiKeys) -> None:
        """Use other keys for the requests that come from now on."""
        self._keys = keys

    def refusal(self, request: Request) -> ApiError | None:
        """Why a request may not come in. Otherwise its owner is set."""
        if self._is_open(request):
            return None
        owner = self._keys.owner(request.headers)
        if owner is None and self._keys.are_needed:
            return _no_key()
        request.owner = owner or ""
        request.is_admin = not self._keys.have_admin or self._keys.is_admin(request.owner)
        return None

    def _is_open(self, request: Request) -> bool:
        return request.path in self._open_paths and (request.method, request.path) not in self._closed

    def admin_refusal(self, request: Request, route: Route) -> ApiError | None:
        """Why a request that may come in may not use this route."""
        if not route.is_admin or not self._keys.have_admin or self._is_open(request):
            return None
        if not request.owner:
            return _no_key()
        if not self._keys.is_admin(request.owner):
            return ApiError(403, "This route needs an admin key (--admin-api-key).", code="admin_key_needed")
        return None

    def host_refusal(self, request: Request) -> ApiError | None:
        """Why a request to this name is refused."""
        if self._allows_all:
            return None
        given = [request.headers[b"host"]] if b"host" in request.headers else []
        if not request.target.startswith(b"/") and (authority := _AUTHORITY.match(request.target)):
            given.append(authority[1].rpartition(b"@")[2])
        if all(map(self._allows, given)):
            return None
        return ApiError(
            421, "This server is not asked for by this name: see the header host, and --allowed-hosts.", code="host_not_allowed"
        )

    def _allows(self, host: bytes) -> bool:
        allowed = self._known.get(host)
        if allowed is None:
            allowed = self._is_allowed(host.decode("latin-1").strip().lower())
            if len(self._known) < _MOST_KNOWN and len(host) < _LONGEST_NAME:
                self._known[host] = allowed
        return allowed

    def _is_allowed(self, host: str) -> bool:
        name = _PORT.sub("", host).rstrip(".")
        is_word = self._allows_words and "." not in name
        return is_word or name in self._names or name.endswith(self._below) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _no_key() -> ApiError:
    how = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    return ApiError(401, f"A valid API key is needed: {how}.", code="invalid_api_key")
