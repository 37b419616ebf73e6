"""/metrics: what is counted and under which names, that several frontends are one server, and that what is old is not shown."""

import asyncio
import mmap
import os
import time
from types import SimpleNamespace

import fake_client as http
import pytest
from fake_client import CHAT, HELLO, NUM_TOKENS
from metrics_cases import FullClient, samples
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from quire.frontend.client.outputs import RequestMetrics
from quire.frontend.client.stream import EngineError
from quire.frontend.http.api.generate import count_request
from quire.frontend.http.api.metrics import metric_names
from quire.frontend.http.api.metrics.metrics import MAX_HANDLERS, Metrics, panel_bytes
from quire.frontend.http.api.metrics.metrics_text import CONTENT_TYPE, MAX_HEARTBEAT_AGE_S, EngineState, metrics_text
from quire.frontend.http.loop_lag import INTERVAL_S, watch_lag
from quire.ipc.messages.stats import (
    Distribution,
)
from quire.ipc.process.usage import process_usage

TINY = 'model_name="tiny",engine="0"'


def test_a_clock_that_is_set_back_takes_nothing_away_from_a_sum():
    """A sum that falls is a restart to Prometheus."""
    hour_ago = 1_000_000.0 - 3600
    times = RequestMetrics(1_000_000.0)
    times.queue_s, times.first_token_time, times.last_token_time, times.finished_time = 0.0, hour_ago, hour_ago, hour_ago
    stream = SimpleNamespace(metrics=times, num_prompt_tokens=3, num_cached_tokens=0)
    metrics = Metrics()
    run = SimpleNamespace(stream=stream, has_begun=False, num_tokens=[2], num_tokens_left_out=0, n=1, max_tokens=16)
    count_request(metrics, run)
    text = metrics_text(metrics, FullClient().welcome, []).decode()
    sums = [value for name, value in samples(text).items() if "_seconds_sum" in name]
    assert sums and min(sums) >= 0


def scrape(client, metrics: Metrics | None = None) -> str:
    engines = [EngineState(n, e.cache, e.heartbeat, e.heartbeat_time) for n, e in enumerate(client.engines)]
    return metrics_text(metrics or Metrics(), client.welcome, engines).decode()


def test_what_is_counted():
    async def main():
        api = http.Api(FullClient())
        await api.json("POST", CHAT, HELLO)
        await api.events(CHAT, {**HELLO, "n": 2, "max_tokens": 30})
        await api.json("POST", CHAT, {**HELLO, "n": 0})
        await api.ask("GET", "/secret-path")
        answer = await api.ask("GET", "/metrics")
        assert answer.headers["content-type"] == CONTENT_TYPE.decode()
        text = answer.body.decode()
        for line in [
            f"vllm:num_requests_running{{{TINY}}} 3.0",
            f"vllm:num_requests_waiting{{{TINY}}} 4.0",
            f'vllm:num_requests_waiting_by_reason{{{TINY},reason="deferred"}} 1.0',
            f"vllm:kv_cache_usage_perc{{{TINY}}} 0.25",
            f"vllm:prompt_tokens_total{{{TINY}}} 100.0",
            f'vllm:prompt_tokens_by_source_total{{{TINY},source="local_compute"}} 60.0',
            f"vllm:generation_tokens_total{{{TINY}}} 50.0",
            f"vllm:prefix_cache_hits_total{{{TINY}}} 40.0",
            f"vllm:num_preemptions_total{{{TINY}}} 2.0",
            f'vllm:request_success_total{{{TINY},finished_reason="stop"}} 3.0',
            'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 2.0',
            'http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 1.0',
            'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
            'http_request_duration_seconds_count{handler="/v1/chat/completions",method="POST"} 3.0',
            "http_request_duration_highr_seconds_count 4.0",
            f"vllm:time_to_first_token_seconds_count{{{TINY}}} 2.0",
            f"vllm:e2e_request_latency_seconds_count{{{TINY}}} 2.0",
            f"vllm:request_queue_time_seconds_count{{{TINY}}} 2.0",
            f"vllm:request_inference_time_seconds_count{{{TINY}}} 2.0",
            f"vllm:request_prompt_tokens_sum{{{TINY}}} 38.0",
            f"vllm:request_prefill_kv_computed_tokens_sum{{{TINY}}} 30.0",
            f"vllm:request_generation_tokens_sum{{{TINY}}} {3.0 * NUM_TOKENS}",
            f"vllm:request_max_num_generation_tokens_sum{{{TINY}}} {2.0 * NUM_TOKENS}",
            f"vllm:request_params_max_tokens_count{{{TINY}}} 1.0",
            f'vllm:iteration_tokens_total_bucket{{{TINY},le="8.0"}} 5.0',
            f'vllm:inter_token_latency_seconds_bucket{{{TINY},le="0.01"}} 0.0',
            f'vllm:inter_token_latency_seconds_bucket{{{TINY},le="0.025"}} 5.0',
            f'quire:batch_fill_ratio_bucket{{{TINY},le="+Inf"}} 4.0',
        ]:
            assert line in text.splitlines(), line
        assert "secret" not in text and 'handler="/metrics"' not in text
        api.client.speak = lambda stream: stream.end(EngineError("broken"))
        await api.json("POST", CHAT, HELLO)
        assert 'finished_reason="error"} 1.0' in (await api.ask("GET", "/metrics")).body.decode()

    asyncio.run(main())


def test_the_first_token_is_counted_when_it_comes():
    async def main():
        api = http.Api()
        api.client.speak = lambda stream: stream.push(http.Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}))
        found = samples((await api.ask("GET", "/metrics")).body.decode())
        assert found[f"vllm:time_to_first_token_seconds_count,{_of()}"] == 1
        assert found[f"vllm:e2e_request_latency_seconds_count,{_of()}"] == 0
        wire.connection.connection_lost(None)
        await asyncio.sleep(0)
        found = samples((await api.ask("GET", "/metrics")).body.decode())
        assert found[f"vllm:time_to_first_token_seconds_count,{_of()}"] == 1
        assert found[f"vllm:e2e_request_latency_seconds_count,{_of()}"] == 1

    asyncio.run(main())


def _of() -> str:
    return "engine=0,model_name=tiny"


def test_buckets_are_written_as_prometheus_client_writes_them():
    metrics = Metrics()
    metrics.observe("request_prompt_tokens", 150)
    client = http.FakeClient()
    client.welcome = _replace(client.welcome, limits=_replace(client.welcome.limits, max_model_len=3_000_000))
    found = samples(scrape(client, metrics))
    for name, (_, buckets) in metric_names.HISTOGRAMS.items():
        prefix = metric_names.PREFIXES.get(name, "vllm:")
        longest = 3_000_000 if buckets is metric_names.TOKENS else float("inf")
        shown = [key.split("le=")[1].split(",")[0] for key in found if key.startswith(f"{prefix}{name}_bucket")]
        assert shown == [floatToGoString(float(b)) for b in buckets if b <= longest] + ["+Inf"], name


def test_token_buckets_end_at_the_longest_sequence():
    metrics = Metrics()
    for tokens in (1, 150, 200):
        metrics.observe("request_prompt_tokens", tokens)
    found = samples(scrape(http.FakeClient(), metrics))  # max_model_len is 200
    of = {
        key.split("le=")[1].split(",")[0]: v for key, v in found.items() if key.startswith("vllm:request_prompt_tokens_bucket")
    }
    assert of == {"1.0": 1, "2.0": 1, "5.0": 1, "10.0": 1, "20.0": 1, "50.0": 1, "100.0": 1, "200.0": 3, "+Inf": 3}


def _replace(struct, **changes):
    return type(struct)(**{**{n: getattr(struct, n) for n in struct.__struct_fields__}, **changes})


# ------------------------------------------------------------------------------------------------- several frontends
def test_frontends_are_added_up_and_the_engine_is_not():
    memory = mmap.mmap(-1, 3 * panel_bytes())
    fronts = [Metrics(memory, i) for i in range(3)]
    for i, metrics in enumerate(fronts):
        metrics.register_handlers(["/v1/models", "/health", CHAT])
        for _ in range(i + 1):
            metrics.count("request_success", "stop")
            metrics.observe("request_params_n", 2)
            metrics.count_http(CHAT, "POST", 200, 0.3)
            metrics.count_http("/health", "GET", 200, 0.1)
    del fronts[1]  # it died
    client = FullClient()
    texts = [scrape(client, metrics) for metrics in fronts]
    for text in texts:
        found = samples(text)
        assert found["vllm:request_success_total,engine=0,finished_reason=stop,model_name=tiny"] == 6
        assert found["vllm:request_params_n_sum,engine=0,model_name=tiny"] == 12
        assert found[f"http_requests_total,handler={CHAT},method=POST,status=2xx"] == 6
        assert found[f"http_request_duration_seconds_bucket,handler={CHAT},le=0.1,method=POST"] == 0
        assert found[f"http_request_duration_seconds_bucket,handler={CHAT},le=0.5,method=POST"] == 6
        assert found["vllm:generation_tokens_total,engine=0,model_name=tiny"] == 50
        assert not any("/health" in key for key in found)
    successor = Metrics(memory, 1)
    successor.count("request_success", "stop")
    assert samples(scrape(client, successor))["vllm:request_success_total,engine=0,finished_reason=stop,model_name=tiny"] == 7


def test_every_process_is_shown_by_name():
    client = FullClient()
    client.set_heartbeat(processes=[process_usage(os.getpid(), "engine"), process_usage(os.getppid(), "worker-0")])
    found = samples(scrape(client))
    for name in ("frontend-0", "engine", "worker-0"):
        assert found[f"process_resident_memory_bytes,process={name}"] > 1 << 20
        assert 0 < found[f"process_open_fds,process={name}"] < found[f"process_max_fds,process={name}"]
        assert found[f"process_cpu_seconds_total,process={name}"] >= 0
        assert found[f"process_start_time_seconds,process={name}"] < time.time()
    assert process_usage(1 << 30, "nobody") is None


def test_a_client_cannot_make_labels():
    metrics = Metrics()
    metrics.register_handlers(f"/route/{i}" for i in range(2 * MAX_HANDLERS))
    for i in range(2 * MAX_HANDLERS):
        metrics.count_http(f"/route/{i}", "BREW", 599, 1e9)
    metrics.count_http("/never/registered", "GET", 100, 0.0)
    found = samples(scrape(http.FakeClient(), metrics))
    assert sum(v for k, v in found.items() if k.startswith("http_requests_total")) == 2 * MAX_HANDLERS + 1
    assert not any("BREW" in key or "never" in key for key in found)


# ------------------------------------------------------------------------------------------------- old, strange, slow
@pytest.mark.parametrize("gone", ["stale", "none yet"])
def test_what_the_engine_said_long_ago_is_not_shown(gone):
    client = FullClient()
    if gone == "stale":
        client.heartbeat_time -= MAX_HEARTBEAT_AGE_S + 0.1
    else:
        client.heartbeat = None
    text = scrape(client)
    assert f"quire:engine_up{{{TINY}}} 0.0" in text
    assert "num_requests_running" not in text and "vllm:request_success_total" in text
    assert f"quire:engine_up{{{TINY}}} 1.0" in scrape(FullClient())


def test_an_engine_with_other_buckets_is_shown_without_them():
    client = FullClient()
    client.set_heartbeat(step_time=Distribution([1, 2], 3.0))
    text = scrape(client)
    assert "quire:step_time_seconds_bucket" not in text and "quire:host_time_seconds_bucket" in text


def test_without_a_prefix_cache_nothing_is_looked_up():
    client = FullClient()
    client.welcome = _replace(client.welcome, cache=_replace(client.welcome.cache, enable_prefix_caching=False))
    found = samples(scrape(client))
    assert found["vllm:prefix_cache_queries_total,engine=0,model_name=tiny"] == 0
    (info,) = [key for key in found if key.startswith("vllm:cache_config_info")]
    assert "block_size=16" in info and "num_gpu_blocks=1000" in info and "enable_prefix_caching=False" in info


def test_a_name_with_quotes_is_escaped():
    client = http.FakeClient()
    client.welcome = _replace(client.welcome, served_model_names=['a"b\\c\nd'])
    families = {f.name: f for f in text_string_to_metric_families(scrape(client))}
    assert families["quire:engine_up"].samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_lag_is_what_the_loop_is_kept_from():
    async def main() -> Metrics:
        metrics = Metrics()
        lag = metrics.histograms["frontend_lag_seconds"]
        watcher = asyncio.create_task(watch_lag(lag))
        await asyncio.sleep(0)
        held_until = time.monotonic() + INTERVAL_S + 0.12
        while time.monotonic() < held_until:  # somebody holds the loop
            pass
        while not metrics.totals()[lag.start : lag.start + len(lag.buckets) + 1].count(1.0):
            await asyncio.sleep(0)
        watcher.cancel()
        return metrics

    found = samples(scrape(http.FakeClient(), asyncio.run(main())))
    assert found["quire:frontend_lag_seconds_count,engine=0,model_name=tiny"] == 1
    assert found["quire:frontend_lag_seconds_bucket,engine=0,le=0.1,model_name=tiny"] == 0


def test_adapters_are_shown_as_gateways_read_them():
    text = scrape(FullClient())
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2",running_lora_adapters="sql,fr",waiting_lora_adapters="de"' in info
    assert abs(float(info.rpartition(" ")[2]) - time.time()) < 60
    for name, value in (("lora_loads", 5), ("lora_evictions", 3), ("lora_load_seconds", 0.25)):
        assert f"quire:{name}_total{{{TINY}}} {float(value)}" in text
