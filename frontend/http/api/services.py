"""Services: the parts of the process that routes use. Made once (server.py), passed to each route, never changed.

`ServingState` has what changes while the process runs. A route knows neither the application that calls it (app.py) nor the
connection (protocol/).
"""

import asyncio
from dataclasses import dataclass, field

from quire.frontend.client.client import Client
from quire.frontend.http.api.bodies.checked import RequestDefaults
from quire.frontend.http.api.bodies.unknown_fields import UnknownFields
from quire.frontend.http.api.logs.request_log import RequestLog
from quire.frontend.http.api.metrics.metrics import Metrics
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.limits.key_limits import CurrentLimits, KeyLimits
from quire.frontend.http.limits.recent_refusals import RecentRefusals
from quire.frontend.http.store.storage import Storage
from quire.frontend.text.request_templates import Render, render_own
from quire.ipc.messages.frontend import EngineLimits

MAX_RESPONSE_BYTES = 128 << 20


@dataclass(slots=True)
class ServingState:
    """draining: the process was told to stop. It still answers requests, but no new ones should be sent to it.

    background: tasks of responses in the background, by id.
    """

    draining: bool = False
    background: dict[str, asyncio.Task[None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Services:
    """client: connected; it reconnects by itself. storage: files, batches and responses that are kept."""

    client: Client
    metrics: Metrics
    request_log: RequestLog
    unknown_fields: UnknownFields
    defaults: RequestDefaults
    parsers: ParserNames
    trust_request_chat_template: bool = False
    max_response_bytes: int = MAX_RESPONSE_BYTES  # of an answer in one piece
    state: ServingState = field(default_factory=ServingState)
    storage: Storage = field(default_factory=Storage)
    render_own: Render = render_own  # renders the model's own chat template
    root_path: str = ""  # prefix of the paths that clients use
    key_limits: KeyLimits | CurrentLimits = field(default_factory=KeyLimits)
    request_timeout_s: float = 0.0  # the longest that a request may take; 0: no limit
    refusals: RecentRefusals = field(default_factory=RecentRefusals)

    @classmethod
    def make(
        cls,
        client: Client,
        metrics: Metrics | None = None,
        log_requests: bool = False,
        defaults: RequestDefaults | None = None,
        parsers: ParserNames | None = None,
        trust_request_chat_template: bool = False,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        storage: Storage | None = None,
        render_own: Render = render_own,
        key_limits: KeyLimits | CurrentLimits | None = None,
        request_timeout_s: float = 0.0,
    ) -> "Services":
        """metrics: None to count for this process alone. storage: None for a private one, made at its first use."""
        return cls(
            client,
            metrics or Metrics(),
            RequestLog(log_requests, client),
            UnknownFields(),
            defaults or RequestDefaults(),
            parsers or ParserNames(),
            trust_request_chat_template,
            max_response_bytes,
            storage=storage or Storage(),
            render_own=render_own,
            key_limits=key_limits or KeyLimits(),
            request_timeout_s=request_timeout_s,
        )

    @property
    def model_names(self) -> list[str]:
        """The served names of the present or last engine's model. Raises EngineDown before the first engine."""
        return self.client.welcome.served_model_names

    @property
    def limits(self) -> EngineLimits:
        """The present or last engine's limits."""
        return self.client.welcome.limits
