"""vLLM's names for docs/migrating-from-vllm.md, each with a verdict: the same, different, or not here.

vllm_names.json has the names of one release of vLLM: flags, routes, fields, metrics, commands. Most verdicts follow from tables
of the source: vllm_flags.py, ROUTES, the notes on fields, metric_names.py, docs/metrics.md. This file has only what those do
not say: how something that works differs, and why something is not there.
"""

import fnmatch
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from api_part import name_of, note_of
from configuration_part import all_commands, parser_of
from markdown import code, table

from quire import LLM
from quire.frontend.cli.vllm_flags import BY_FLAG, Verdict, verdicts
from quire.frontend.client.not_here import LLM_METHODS
from quire.frontend.http.api.bodies.body import IGNORED
from quire.frontend.http.api.metrics import metric_names
from quire.frontend.http.api.routes import ROUTES
from quire.ipc.sampling import SamplingParams

HERE = Path(__file__).parent
VLLM: dict[str, Any] = json.loads((HERE / "vllm_names.json").read_text())
SAME, DIFFERS, NOT_HERE = "same", "differs", "not here"

_DRAFTS = "ngram, draft_model, eagle3 and mtp are served, other methods not yet"
FLAGS_DIFFER = {
    "--convert": "embed beside --runner generate: the model does both",
    "--pooler-config": "seq_pooling_type (LAST, MEAN, CLS) and use_activation",
    "--api-server-count": "default 1; also --frontends",
    "--block-size": "16 to 256; default 64 on a GPU, 16 on a CPU",
    "--config": "a key that does not exist is an error",
    "--data-parallel-size": "engines of one host, each by itself; a request goes where its prompt is cached",
    "--disable-access-log-for-endpoints": "there is no access log unless --access-log asks for it",
    "--disable-uvicorn-access-log": "there is no access log unless --access-log asks for it",
    "--dtype": "auto is float32 on a CPU",
    "--enable-expert-parallel": "over the GPUs of --tensor-parallel-size; over those of --data-parallel-size it is refused",
    "--enable-log-requests": "ids, lengths and parameters; never a text",
    "--gpu-memory-utilization": "default 0.9 (vLLM: 0.92)",
    "--hf-overrides": "JSON; fields that a model does not know are refused by name",
    "--host": "default 127.0.0.1 (vLLM: all addresses)",
    "--load-format": "auto, safetensors, dummy",
    "--logits-processors": "FILE.py:CLASS, too; steps without such requests are as fast as ever",
    "--max-logprobs": "0 to 128; -1 is 128, not the whole vocabulary",
    "--max-num-batched-tokens": "default 8192 on a GPU, 512 on a CPU",
    "--max-num-seqs": "default 1024 on a GPU of 70 GB and more, 256 on smaller ones, 64 on a CPU",
    "--otlp-traces-endpoint": "OTLP over HTTP, not gRPC",
    "--profiler-config": "torch's profiler and its folder, nothing else",
    "--reasoning-parser": "found by the chat template, unless it is named; the names are in configuration.md",
    "--seed": "the same noise at every start, but not vLLM's",
    "--spec-method": _DRAFTS,
    "--spec-model": _DRAFTS,
    "--spec-tokens": "default 15, with a draft model 7, at most 15",
    "--speculative-config": f"{_DRAFTS}, answers do not change, and what does not pay is left out by itself",
    "-sc": "as --speculative-config",
    "--shutdown-timeout": "default 30 s (vLLM: 0); also --shutdown-grace-s",
    "--pipeline-parallel-size": "GPUs of one host, or of several by --hosts or Ray",
    "--tensor-parallel-size": "GPUs of one host, or of several by --hosts or Ray",
    "-dp": "as --data-parallel-size",
    "-pp": "GPUs of one host, or of several by --hosts or Ray",
    "-tp": "GPUs of one host, or of several by --hosts or Ray",
    "--tool-call-parser": "found by the chat template, unless it is named; the names are in configuration.md",
    "--uvicorn-log-level": "of the engine, too; also --log-level",
}
COMMANDS = {
    "serve": (SAME, "`quire serve`; the model before the flags"),
    "chat": (DIFFERS, "`quire chat`: --url with or without /v1; flags of its own"),
    "complete": (DIFFERS, "`quire complete`: likewise"),
    "bench serve": (
        SAME,
        "`quire bench serve`: flags that are here mean the same; datasets: random, random-mm, random-rerank, sharegpt, custom",
    ),
    "bench latency": (SAME, "`quire bench latency`"),
    "bench throughput": (SAME, "`quire bench throughput`"),
    "bench startup": (SAME, "`quire bench startup`"),
    "bench sweep": (NOT_HERE, "a loop around `quire bench serve`"),
    "bench mm-processor": (NOT_HERE, "models of text only are served"),
    "run-batch": (SAME, "`quire run-batch`; started again, it goes on where it was"),
    "collect-env": (SAME, "`quire collect-env`"),
    "launch render": (NOT_HERE, "`/tokenize` renders and tokenizes"),
}
_RLHF = "weights are read once, at the start"
_RENDER = "`/tokenize` gives the token ids of a conversation, `/inference/v1/generate` takes them"
_SLEEP = "engines do not sleep"
ROUTES_NOT_HERE = {
    "GET /redoc": "`/docs` and `/openapi.json` describe the API",
    "GET /get_world_size": "`/server_info` has tensor_parallel_size",
    "GET /is_paused": _SLEEP,
    "GET /is_sleeping": _SLEEP,
    "POST /pause": _SLEEP,
    "POST /resume": _SLEEP,
    "POST /sleep": _SLEEP,
    "POST /wake_up": _SLEEP,
    "POST /abort_requests": "a client that hangs up aborts its request, within a step",
    "POST /collective_rpc": "no code is called by name from a wire",
    "POST /init_weight_transfer_engine": _RLHF,
    "POST /start_weight_update": _RLHF,
    "POST /start_draft_weight_update": _RLHF,
    "POST /update_weights": _RLHF,
    "POST /finish_weight_update": _RLHF,
    "POST /invocations": "SageMaker's route: use /v1/chat/completions",
    "POST /scale_elastic_ep": "the GPUs that share experts are those that the server was started with",
    "POST /is_scaling_elastic_ep": "the GPUs that share experts are those that the server was started with",
    "POST /generative_scoring": "logprobs of /v1/completions say the same",
    "POST /reset_mm_cache": "images are known by digests, which do not age",
    "POST /reset_encoder_cache": "images are known by digests, which do not age",
    "POST /v1/chat/completions/batch": "requests of their own are batched; /v1/batches takes files",
    "POST /v1/chat/completions/render": _RENDER,
    "POST /v1/completions/render": _RENDER,
    "POST /v1/chat/completions/derender": _RENDER,
    "POST /v1/completions/derender": _RENDER,
    "WEBSOCKET /v1/realtime": "audio is not served yet",
}
ROUTES_DIFFER = {
    "POST /v1/embeddings": "texts and token ids; messages are refused",
    "POST /pooling": "texts and token ids; messages are refused",
    "POST /classify": "texts and token ids; messages are refused",
    "POST /v2/embed": "texts; images are refused",
    "GET /health": "200 only while the engine's loop turns and no step hangs; `/live` says that the process answers",
    "GET /load": "of this process; always counted",
    "GET /ping": "as /health",
    "POST /ping": "as /health",
    "GET /metrics": "needs the API key, unless --metrics-open",
    "GET /server_info": "no VLLM_SERVER_DEV_MODE is needed; the configuration is Quire's",
    "POST /reset_prefix_cache": "no VLLM_SERVER_DEV_MODE is needed; requests that run keep their blocks",
    "POST /start_profile": "needs --profile-dir or --profiler-config",
    "POST /stop_profile": "answers with the files that it wrote",
    "GET /tokenizer_info": "always there",
}
_MULTI = "at most --max-logprobs, which is 20 and can be 128; -1: as many as that, not the whole vocabulary"
FIELDS_DIFFER = {
    "n": "at most 128",
    "messages": "parts of type text only",
    "logprobs": _MULTI,
    "top_logprobs": _MULTI,
    "prompt_logprobs": _MULTI,
    "stop": "at most 64 texts of 1,024 characters",
    "stop_token_ids": "at most 240",
    "logit_bias": "at most 1,024 tokens, -100 to 100",
    "bad_words": "at most 256 of 16 tokens",
    "tools": "256 KiB in all",
    "use_beam_search": "up to 64 beams; not with stream",
    "seed": "other noise than vLLM's: the same seed gives the same tokens here, and others there",
    "structured_outputs": "one backend (llguidance), 256 KiB, 64 brackets deep",
    "response_format": "the same limits; beside tools, calls may come in its place",
    "tool_choice": "auto needs no --enable-auto-tool-choice",
    "priority": "32 bits",
    "request_id": "letters, digits and ._:- only",
    "extra_args": "64 names, 16 KiB",
    "vllm_xargs": "64 names, 16 KiB",
}
# For one route, where it differs from the above.
_THERE = {
    ("POST /v1/chat/completions", "logprobs"): "",  # true or false
    ("POST /v1/messages", "messages"): "blocks of text, images, reasoning, calls and results; no documents",
    ("POST /v1/messages/count_tokens", "messages"): "blocks of text, images, reasoning, calls and results; no documents",
}
FIELDS_NOT_HERE = {
    "POST /inference/v1/generate": {
        "assistant_tokens_mask": "of vLLM's render routes only; left out silently",
        "token_offsets": "of vLLM's render routes only; left out silently",
        "ec_transfer_params": "there are no encoders",
    },
    "SamplingParams": {
        "logprob_token_ids": "use logprobs, which lists the likeliest",
        "flat_logprobs": "there is one form of logprobs",
        "skip_clone": "a request keeps a copy, which costs a microsecond",
        "output_text_buffer_length": "computed where it is needed",
        "routed_experts_prompt_start": "which experts were chosen is not told",
        "repetition_detection": "use max_tokens, or the penalties",
    },
}


LLM_DIFFERS = {
    "encode": "the task is PoolingParams' or pooling_task; outputs have numpy arrays where vLLM has tensors",
    "embed": "decoders for now; use_tqdm has no effect",
    "classify": "decoders for now; use_tqdm has no effect",
    "score": "texts; a classifier of one label, or the cosine of vectors",
    "generate": "prompts of text: no multi_modal_data, no prompt_embeds; outputs are vLLM's",
    "chat": "messages of text; chat_template takes a template of the caller's",
    "get_tokenizer": "transformers' tokenizer of the local files",
    "start_profile": "needs profile_dir; profile_prefix has no effect",
    "get_metrics": "figures of the heartbeat, at most half a second old; a server has more at /metrics",
    "reset_mm_cache": "there is none: it does nothing",
    "reset_prefix_cache": "requests that run keep their blocks: reset_running_requests is refused",
}


def _check(table: Collection[str], names: Iterable[str], what: str) -> None:
    """Raises ValueError if a table here has names that do not exist."""
    if stale := set(table) - set(names):
        raise ValueError(f"migration_part.py says something of {what} that do not exist: {', '.join(sorted(stale))}")


def _verdict_table(head: str, rows: list[tuple[str, str, str]]) -> str:
    counts = ", ".join(f"{sum(row[1] == verdict for row in rows)} {verdict}" for verdict in dict.fromkeys(r[1] for r in rows))
    return f"{len(rows)}: {counts}.\n\n" + table([head, "", ""], [[code(name), verdict, text] for name, verdict, text in rows])


# ---------------------------------------------------------------------------------------------------------- commands, flags
def commands() -> str:
    here = {parser.prog.removeprefix("quire ") for parser in all_commands()}
    rows = [(f"vllm {name}", *COMMANDS[name]) for name in VLLM["commands"]]
    assert {name for name, (verdict, _) in COMMANDS.items() if verdict != NOT_HERE} <= here
    return _verdict_table("command", rows)


def flags() -> str:
    known = parser_of("serve").actions()
    _check(FLAGS_DIFFER, known, "flags")
    names = {flag: max(action.option_strings[0], flag, key=len) for flag, action in known.items()}
    rows = []
    for verdict in verdicts(names):
        if verdict.status == "works":
            text = FLAGS_DIFFER.get(verdict.flag, "")
            rows.append((verdict.flag, DIFFERS if text else SAME, text or verdict.text))
        else:
            rows.append((verdict.flag, *_not_ours(verdict)))
    return _verdict_table("flag", rows)


def _not_ours(verdict: Verdict) -> tuple[str, str]:
    """The verdict and text of a vLLM flag that quire serve does not use."""
    row = BY_FLAG[verdict.flag]
    if verdict.status == "nothing":
        return DIFFERS, f"taken, without effect: {verdict.text}"
    if row.fine == ("on",):
        return SAME, f"always so: {verdict.text}"
    taken = ", ".join(code(value) for value in row.fine if value not in ("off", ""))
    return NOT_HERE, verdict.text + (f"; taken: {taken}" if taken else "")


# ------------------------------------------------------------------------------------------------------------------ routes
def routes() -> str:
    here = {name_of(route): route for route in ROUTES.routes}
    _check([*ROUTES_NOT_HERE, *ROUTES_DIFFER], VLLM["routes"], "routes")
    _check([name for name in ROUTES_NOT_HERE if name in here], (), "routes that are missing")
    rows = []
    for name in VLLM["routes"]:
        route = here.get(name) or here.get(name.replace("{response_id}", "{id}"))
        if route is None:
            rows.append((name, NOT_HERE, ROUTES_NOT_HERE.get(name, "not here yet")))
        elif route.missing:
            rows.append((name, NOT_HERE, "answers 501"))
        else:
            text = ROUTES_DIFFER.get(name, "")
            rows.append((name, DIFFERS if text else SAME, text))
    return _verdict_table("route", rows)


# ------------------------------------------------------------------------------------------------------------------ fields
def fields() -> str:
    bodies = {name_of(route): route.body for route in ROUTES.routes if route.body is not None}
    _check(FIELDS_DIFFER, (name for names in VLLM["fields"].values() for name in names), "fields")
    parts = []
    for place, names in VLLM["fields"].items():
        body = bodies.get(place)
        if place == "SamplingParams":
            rows = [_field_of_params(name) for name in names]
        elif body is None:
            parts.append(f"### `{place}`\n\nNot here yet.")
            continue
        else:
            rows = [_field(place, body, name) for name in names]
        parts.append(f"### `{place}`\n\n{_verdict_table('field', rows)}")
    return "\n\n".join(parts)


def _field(place: str, body: Any, name: str) -> tuple[str, str, str]:
    why = FIELDS_NOT_HERE.get(place, {}).get(name)
    if why is not None:
        return name, NOT_HERE, why
    if name not in body.__struct_fields__ and name not in IGNORED:
        raise KeyError(f"{place}: nothing is said of vLLM's field {name}")
    note = note_of(body, name)
    if note.treatment == "refused":
        return name, NOT_HERE, f"400: {note.text}"
    if note.treatment == "harmless":
        return name, SAME, f"taken, without effect: {note.text}"
    text = _THERE.get((place, name), FIELDS_DIFFER.get(name, ""))
    return name, DIFFERS if text else SAME, text


def _field_of_params(name: str) -> tuple[str, str, str]:
    if name not in SamplingParams.__struct_fields__:
        return name, NOT_HERE, FIELDS_NOT_HERE["SamplingParams"][name]
    text = FIELDS_DIFFER.get(name, "")
    return name, DIFFERS if text else SAME, text


# ------------------------------------------------------------------------------------------------------------------ Python
def python() -> str:
    _check([*LLM_DIFFERS, *LLM_METHODS], VLLM["llm"], "methods")
    rows = []
    for name in VLLM["llm"]:
        is_here = hasattr(LLM, name)
        text = LLM_DIFFERS.get(name, "") if is_here else LLM_METHODS[name]
        rows.append((f"LLM.{name}", (DIFFERS if text else SAME) if is_here else NOT_HERE, text))
    return _verdict_table("method", rows)


# ----------------------------------------------------------------------------------------------------------------- metrics
_ONE = "one of a request; in vLLM one of each of its n choices"
METRICS_DIFFER = {
    "vllm:request_generation_tokens": f"over all choices: {_ONE}",
    "vllm:request_params_max_tokens": f"of requests that set it, in vLLM else what the context leaves; {_ONE}",
} | {
    f"vllm:{name}": _ONE
    for name in (
        "e2e_request_latency_seconds", "time_to_first_token_seconds", "request_time_per_output_token_seconds",
        "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_prefill_kv_computed_tokens",
    )
}  # fmt: skip


def metrics() -> str:
    here, reasons = _metrics_here(), _reasons()
    rows = []
    for name in VLLM["metrics"]:
        if name.removesuffix("_total") in here:
            text = METRICS_DIFFER.get(name, "")
            rows.append((name, DIFFERS if text else SAME, text))
        else:
            why = next(text for pattern, text in reasons if any(fnmatch.fnmatch(n, pattern) for n in (name, f"{name}_total")))
            rows.append((name, NOT_HERE, why))
    return _verdict_table("metric", rows)


def _metrics_here() -> set[str]:
    """Without _total, as the tables have most of them."""
    m = metric_names
    tables = (m.GAUGES, m.COUNTERS, m.DRAFT_COUNTERS, m.LABELLED_GAUGES, m.LABELLED_COUNTERS, m.ENGINE_HISTOGRAMS)
    names = {row[0] for rows in tables for row in rows} | {m.REQUEST_SUCCESS[0], m.LORA_INFO[0], "vllm:cache_config_info"}
    names |= {name for name, _ in m.MEDIA.values()}
    names |= {m.PREFIXES.get(name, "vllm:") + name for name in m.HISTOGRAMS}
    return {name.removesuffix("_total") for name in names}


def _reasons() -> list[tuple[str, str]]:
    """Patterns and why, from the table of docs/metrics.md."""
    page = (HERE.parent / "metrics.md").read_text().partition("## Not here")[2]
    lines = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    return [(name, why.strip()) for names, why in lines for name in re.findall(r"`([^`]+)`", names)]
