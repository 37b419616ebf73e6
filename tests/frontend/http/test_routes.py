"""The other routes, over a fake wire: models, health, tokenize, metrics, and what is not there."""

import asyncio

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO, NUM_TOKENS

from quire.frontend.client.async_client import EngineError


def test_models():
    async def main():
        api = http.Api()
        _, answer = await api.json("GET", "/v1/models")
        assert answer["object"] == "list" and [m["id"] for m in answer["data"]] == ["tiny", "org/tiny"]
        assert answer["data"][0]["max_model_len"] == 200 and answer["data"][1]["root"] == "tiny"
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            status, card = await api.json("GET", path)
            assert status == 200 and card["id"] == "org/tiny" and card["object"] == "model"
        for method, path, body in [
            ("GET", "/v1/models/huge", None),
            ("POST", CHAT, {**HELLO, "model": "huge"}),
            ("POST", COMPLETIONS, {"prompt": "a", "model": "huge"}),
            ("POST", "/tokenize", {"prompt": "a", "model": "huge"}),
        ]:
            status, answer = await api.json(method, path, body)
            assert status == 404 and answer["error"]["code"] == "model_not_found" and answer["error"]["param"] == "model"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(path):
    async def main():
        api = http.Api()
        answer = await api.ask("GET", path)
        assert answer.status == 200 and answer.body == b""
        assert (await api.ask("HEAD", path)).status == 200
        api.client.problem = "the engine's loop has not been heard for 2 s"
        answer = await api.ask("GET", path)
        assert answer.status == 503 and b"not been heard" in answer.body and answer.headers["retry-after"] == "2"

    asyncio.run(main())


def test_version():
    assert asyncio.run(http.Api().json("GET", "/version")) == (200, {"version": "0.1.0"})


def test_tokenize_and_detokenize():
    async def main():
        api = http.Api()
        _, answer = await api.json("POST", "/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True})
        assert answer["count"] == 3 and answer["max_model_len"] == 200 and answer["token_strs"][0] == "h"
        _, text = await api.json("POST", "/detokenize", {"tokens": answer["tokens"]})
        assert text == {"prompt": "hé"}
        _, answer = await api.json("POST", "/tokenize", HELLO)
        assert api.client.tokenizer.decode(answer["tokens"]) == "<user>hi<assistant>" and answer["token_strs"] is None
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", **HELLO}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {**HELLO, "chat_template": "x"}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}),
        ]:
            assert (await api.json("POST", path, body))[0] == 400, body

    asyncio.run(main())


def test_unknown_paths_methods_and_types():
    async def main():
        api = http.Api()
        for path in ("/", "/nope", "/v1", "/v1/chat/completions/", "//health", "/health/", "/%68ealth", "http://a@x/health"):
            assert (await api.ask("GET", path)).status == 404, path
        answer = await api.ask("GET", CHAT)
        assert answer.status == 405 and answer.headers["allow"] == "POST"
        answer = await api.ask("DELETE", "/v1/models")
        assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Type": "text/plain"})).status == 415
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Encoding": "gzip"})).status == 415
        assert (await api.ask("POST", CHAT, HELLO, {"Content-Type": "application/json; charset=utf-8"})).status == 200
        assert (await api.ask("GET", "/health?x=/v1/models")).status == 200

    asyncio.run(main())


def test_metrics():
    async def main():
        api = http.Api()
        await api.json("POST", CHAT, HELLO)
        await api.events(CHAT, {**HELLO, "n": 2, "max_tokens": 30})
        await api.json("POST", CHAT, {**HELLO, "n": 0})
        await api.ask("GET", "/secret-path")
        text = (await api.ask("GET", "/metrics")).body.decode()
        for line in [
            'quire:num_requests_running{model_name="tiny"} 3.0',
            'quire:num_requests_waiting{model_name="tiny"} 4.0',
            'quire:kv_cache_usage_perc{model_name="tiny"} 0.25',
            'quire:prompt_tokens_total{model_name="tiny"} 100.0',
            'quire:generation_tokens_total{model_name="tiny"} 50.0',
            'quire:prefix_cache_hits_total{model_name="tiny"} 40.0',
            'quire:num_preemptions_total{model_name="tiny"} 2.0',
            'quire:request_success_total{finished_reason="stop",model_name="tiny"} 3.0',
            'quire:http_requests_total{handler="/v1/chat/completions",status="2xx"} 2.0',
            'quire:http_requests_total{handler="/v1/chat/completions",status="4xx"} 1.0',
            'quire:http_requests_total{handler="other",status="4xx"} 1.0',
            'quire:time_to_first_token_seconds_count{model_name="tiny"} 2.0',
            'quire:e2e_request_latency_seconds_count{model_name="tiny"} 2.0',
            'quire:request_queue_time_seconds_count{model_name="tiny"} 2.0',
            'quire:request_prompt_tokens_sum{model_name="tiny"} 38.0',
            f'quire:request_generation_tokens_sum{{model_name="tiny"}} {3.0 * NUM_TOKENS}',
            'quire:request_params_max_tokens_count{model_name="tiny"} 1.0',
        ]:
            assert line in text, line
        assert "secret" not in text
        api.client.speak = lambda stream: stream.end(EngineError("broken"))
        await api.json("POST", CHAT, HELLO)
        assert 'finished_reason="error",model_name="tiny"} 1.0' in (await api.ask("GET", "/metrics")).body.decode()
        gaps = len(api.client.OUTPUT)  # turns of the one stream, less one
        assert f'quire:inter_token_latency_seconds_count{{model_name="tiny"}} {gaps}.0' in text

    asyncio.run(main())
