"""The error codes with their statuses and reasons: a table for docs/, held to the code by a test. The code does not read it."""

# Code -> status, reason.
ERROR_CODES: dict[str, tuple[str, str]] = {
    "invalid_value": ("400", "a field has a value that is never valid; `param` names the field, the text says what would work"),
    "invalid_type": ("400", "a field has another type than it takes"),
    "missing_required_parameter": ("400", "a field that is needed is not there"),
    "unsupported_value": (
        "400",
        "a field asks for something that is not supported; the text says what to use instead, if there is anything",
    ),
    "context_length_exceeded": ("400", "prompt and answer do not fit into the context; the text has the numbers"),
    "invalid_json": ("400", "the body is no JSON, or nested too deeply"),
    "body_too_complex": ("400", "the body's JSON has more values than is reasonable"),
    "invalid_form": ("400", "the body of an upload is no form"),
    "response_too_large": ("400", "the answer is longer than --max-response-mib: ask for a stream, or for less"),
    "storage_full": (
        "400",
        "server or API key keep as many files, batches or responses as they may (--max-files-mib, --limits)",
    ),
    "previous_response_not_found": ("400", "`previous_response_id` names none of this key, or one that was not kept"),
    "response_in_progress": ("400", "`previous_response_id` names one that is still being made"),
    "item_not_found": ("400", "an item_reference names no item of a kept response"),
    "not_in_background": ("400", "only a response of background: true can be cancelled"),
    "batch_ended": ("400", "a batch that has ended cannot be cancelled"),
    "invalid_api_key": ("401", "no key, or a wrong one"),
    "origin_not_allowed": ("403", "a web page of another origin uploads a file"),
    "not_found": ("404", "no such path, file or batch; a path that is nearly right is named"),
    "model_not_found": ("404", "`model` is none of the served names"),
    "method_not_allowed": ("405", "the path takes other methods, which the header allow lists"),
    "request_timeout": ("408", "head or body did not arrive in time"),
    "body_too_large": ("413", "the body is longer than --max-body-mib, or a file than 200 MiB"),
    "target_too_long": ("414", "path and query are longer than 8 KiB"),
    "unsupported_media_type": ("415", "the header content-type is not the route's, or the body is compressed"),
    "rate_limit_exceeded": ("429", "the API key has all that it may have (--limits); header retry-after"),
    "header_too_large": ("431", "the head is longer than --h11-max-incomplete-event-size or has too many fields"),
    "too_many_requests": ("400", "more than 16 requests were sent on a connection before the first was answered"),
    "bad_request": ("400, 405, 417, 501, 505", "it is not HTTP/1.1 as the server speaks it"),
    "internal_error": ("500", "a fault of the server; its log has the details"),
    "engine_error": (
        "500",
        "the engine failed on the request: workers died twice with it, a grammar left nothing to sample",
    ),
    "not_implemented": ("501", "a route of vLLM's or OpenAI's that is not here yet"),
    "engine_down": (
        "503",
        "the engine is away or starts, or its workers are away for long; header retry-after",
    ),
    "overloaded": (
        "503",
        "the queue is too long (--max-queue-s, --max-num-waiting, --max-num-queued-tokens), or too many bodies are held; "
        "header retry-after",
    ),
    "deadline_exceeded": ("504", "the request's timeout has passed, or would before it began; header x-should-retry: false"),
    "shutting_down": ("503", "the server was told to stop; header retry-after"),
    "unhealthy": ("503", "what /health and /ready say while the engine is not well; header retry-after"),
    "too_many_connections": ("503", "--max-connections are open; header retry-after"),
    "storage_error": ("503", "the folder of --files-dir cannot be written or read; header retry-after"),
}
