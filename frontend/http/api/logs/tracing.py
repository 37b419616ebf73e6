"""--otlp-traces-endpoint: an OpenTelemetry span for each request that generates, within the trace that its client sends.

With the flag, `TracedApp` stands between the protocol and the application; without it nothing of this file runs, and
OpenTelemetry is not imported. generate.py reports a request's runs in a context variable. A thread of the SDK encodes and sends
spans in batches; if the collector is down, spans are lost but requests are not delayed. Names are vLLM's (`llm_request`, its
gen_ai.* attributes) and those of OpenTelemetry's semantic conventions. Spans contain no text of a prompt or an answer.
"""

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.frontend.http.api.generate import Generated, generated_by
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.protocol.exchange import Request, Response
from quire.frontend.http.server_state import Application
from quire.frontend.supervisor import in_daemon_thread
from quire.ipc.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger("quire.http")

EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_S = 3.0  # the process waits so long for the collector when it ends
MAX_PROMPTS = 8  # a request's first prompts, which have spans for their phases; a span costs 30 us
_BATCH = 512  # spans


class TracingError(Exception):
    """Spans cannot be sent; the text is for the operator."""


def check_endpoint(endpoint: str | None) -> None:
    """Raises TracingError, with advice, if spans cannot be sent there."""
    if endpoint is not None:
        _exporter(endpoint).shutdown()


class TracedApp:
    """`app`, with a span for each request. endpoint: a collector's URL for OTLP over HTTP. Raises TracingError."""

    def __init__(self, app: Application, services: Services, endpoint: str) -> None:
        self._app = app
        self._services = services
        self._provider = _provider(endpoint)
        self._tracer = self._provider.get_tracer("quire", VERSION)

    def admit(self, request: Request) -> ApiError | None:
        return self._app.admit(request)

    async def handle(self, request: Request, response: Response) -> None:
        generated = Generated()
        token = generated_by.set(generated)
        try:
            await self._app.handle(request, response)
        finally:
            generated_by.reset(token)
            if generated.runs:
                self._trace(request, response, generated)
            else:
                generated.late = partial(self._trace, request, response)

    async def close(self) -> None:
        """Send the remaining spans, if the collector takes them within LAST_EXPORT_S."""
        try:
            async with asyncio.timeout(LAST_EXPORT_S):
                await in_daemon_thread(self._provider.shutdown)
        except TimeoutError:
            log.warning("the collector of --otlp-traces-endpoint did not take the last spans")

    def _trace(self, request: Request, response: Response, generated: Generated) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            "llm_request",
            _parent(request),
            kind=SpanKind.SERVER,
            start_time=_ns(generated.runs[0].stream.metrics.arrival_time),
            attributes={"http.route": request.path.decode("latin-1"), "http.request.method": request.method},
        )
        if span.is_recording():
            span.set_attributes(_attributes(generated, self._services.model_names[0]))
            span.set_attribute("http.response.status_code", response.status)
            if error := next((run.stream.error for run in generated.runs if run.stream.error is not None), None):
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(StatusCode.ERROR, str(error))
            context = set_span_in_context(span)
            for run in generated.runs[:MAX_PROMPTS]:
                for name, start, end in phases(run):
                    self._tracer.start_span(name, context, start_time=_ns(start)).end(_ns(end))
        span.end()


def phases(run: PromptRun) -> list[tuple[str, float, float]]:
    """Name, start and end (seconds since the Unix epoch) of the phases that a run has reached: queue, prefill, decode."""
    times = run.stream.metrics
    end = times.finished_time or time.time()
    if times.queue_s is None or times.first_token_time is None:
        return [("queue", times.arrival_time, end)]
    first_step, first = times.arrival_time + times.queue_s, times.first_token_time
    first_step = min(first_step, first)
    last = max(times.last_token_time or first, first)
    return [("queue", times.arrival_time, first_step), ("prefill", first_step, first), ("decode", first, last)]


def _attributes(generated: Generated, model: str) -> dict[str, str | int | float | list[str]]:
    runs, params = generated.runs, generated.runs[0].params
    prompt = sum(run.stream.num_prompt_tokens for run in runs)
    output = sum(sum(run.num_tokens) + run.num_tokens_left_out for run in runs)
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.id": generated.name,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": generated.name,
        "gen_ai.request.n": runs[0].n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": len(runs) * runs[0].n,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
        "gen_ai.usage.input_tokens": prompt,  # the conventions' current names
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.cache_read.input_tokens": sum(run.stream.num_cached_tokens or 0 for run in runs),
        "gen_ai.response.finish_reasons": [
            reason or ("error" if run.stream.error else "abort") for run in runs for reason in run.finish_reasons
        ],
    }
    if runs[0].max_tokens is not None:
        found["gen_ai.request.max_tokens"] = runs[0].max_tokens
    return found | _latencies(runs)


def _latencies(runs: list[PromptRun]) -> dict[str, float]:
    """Latencies in seconds. With several prompts: the phases of the first one, and the end of the last one."""
    times = runs[0].stream.metrics
    end = max(run.stream.metrics.finished_time or time.time() for run in runs)
    found = {"gen_ai.latency.e2e": end - times.arrival_time}
    took = {name: stop - start for name, start, stop in phases(runs[0])}
    found["gen_ai.latency.time_in_queue"] = took["queue"]
    if "decode" in took and times.first_token_time is not None:
        found["gen_ai.latency.time_to_first_token"] = times.first_token_time - times.arrival_time
        found["gen_ai.latency.time_in_model_prefill"] = took["prefill"]
        found["gen_ai.latency.time_in_model_decode"] = took["decode"]
        found["gen_ai.latency.time_in_model_inference"] = took["prefill"] + took["decode"]
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _parent(request: Request) -> "Context":
    """The client's trace, from the W3C's headers; invalid ones count as absent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    names = (b"traceparent", b"tracestate")
    carrier = {name.decode(): request.headers[name].decode("latin-1") for name in names if name in request.headers}
    return TraceContextTextMapPropagator().extract(carrier)


# ------------------------------------------------------------------------------------------------------- the SDK
def _exporter(endpoint: str) -> "SpanExporter":
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise TracingError(
            f"--otlp-traces-endpoint {endpoint}: OTLP goes over HTTP here: http://HOST:4318/v1/traces (gRPC is not supported)"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracingError("--otlp-traces-endpoint needs OpenTelemetry: pip install '.[otlp]' in Quire's folder") from None
    path = url.path if url.path.strip("/") else "/v1/traces"
    return OTLPSpanExporter(url._replace(path=path).geturl(), timeout=EXPORT_TIMEOUT_S)


def _provider(endpoint: str) -> "TracerProvider":
    exporter = _exporter(endpoint)
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    class Reporting(SpanExporter):
        """Logs once that the collector does not answer, and once that it answers again: the SDK would log every batch."""

        works = True

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            result = exporter.export(spans)
            if (works := result.name == "SUCCESS") != self.works:
                self.works = works
                text = "takes spans again" if works else "does not take spans; requests are not affected"
                log.warning("the collector at %s %s", endpoint, text)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, if they are set
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Reporting(), max_export_batch_size=_BATCH))
    return provider
