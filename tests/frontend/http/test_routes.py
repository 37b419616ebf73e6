"""The other routes, over a fake wire: models, health, tokenize, metrics, and what is not there."""

import asyncio

import fake_client as http
import pytest
from fake_client import CHAT, COMPLETIONS, HELLO
from fake_http import settle

from quire.frontend.http.protocol.cors import Cors


def test_models():
    async def main():
        api = http.Api()
        _, answer = await api.json("GET", "/v1/models")
        assert answer["object"] == "list" and [m["id"] for m in answer["data"]] == ["tiny", "org/tiny"]
        assert answer["data"][0]["max_model_len"] == 200 and answer["data"][1]["root"] == "tiny"
        assert answer["data"][0]["created"] == 1700000000 and answer["data"][0]["parent"] is None
        assert answer["data"][0]["permission"][0]["object"] == "model_permission"
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


def test_live_ready_and_ping():
    async def main():
        api = http.Api()
        for method, path in [("GET", "/live"), ("GET", "/ready"), ("POST", "/ping"), ("HEAD", "/ready")]:
            assert (await api.ask(method, path)).status == 200
        api.client.problem = "the engine's workers are starting"
        assert (await api.ask("GET", "/live")).status == 200
        for method, path in [("GET", "/ready"), ("POST", "/ping")]:
            assert (await api.ask(method, path)).status == 503
        api.client.problem = None
        api.services.state.draining = True
        answer = await api.ask("GET", "/ready")
        assert answer.status == 503 and b"shutting down" in answer.body and answer.headers["retry-after"]
        assert (await api.ask("GET", "/health")).status == (await api.ask("GET", "/live")).status == 200
        assert (await api.ask("POST", CHAT, HELLO)).status == 200

    asyncio.run(main())


def test_load_counts_requests_under_way():
    async def main():
        api = http.Api()
        api.client.speak = None
        assert await api.json("GET", "/load") == (200, {"server_load": 0})
        wires = [api.wire() for _ in range(2)]
        for wire in wires:
            await wire.talk(api.encode("POST", CHAT, {**HELLO, "stream": True}))
        assert await api.json("GET", "/load") == (200, {"server_load": 2})
        for wire in wires:
            wire.connection.connection_lost(None)
        await settle()
        assert await api.json("GET", "/load") == (200, {"server_load": 0})

    asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    ["/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"],
)
def test_what_needs_other_models_says_so(path):
    async def main():
        api = http.Api()
        for headers in ({}, {"Content-Type": "multipart/form-data; boundary=x"}):
            status, answer = await api.json("POST", path, b"{}", headers)
            assert status == 501 and answer["error"]["code"] == "not_implemented"
            assert "not supported by this server yet" in answer["error"]["message"]
        assert (await api.ask("GET", path)).status == 405

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/chat/completion", "/v1/chat/completions"),
        ("/V1/Models", "/v1/models"), ("/v1/completions/", "/v1/completions"), ("/healthz", "/health"),
        ("/models", "/v1/models"), ("/v1/chat", "/v1/chat/completions"), ("/chat/", "/v1/chat/completions"), ("/v1", None),
        ("/something/else", None), ("/" + "v" * 5000, None),
    ],
)  # fmt: skip
def test_a_path_that_is_nearly_right_says_so(path, meant):
    status, answer = asyncio.run(http.Api().json("GET", path))
    assert status == 404
    assert answer["error"]["message"] == "There is no such path here." + (f" Did you mean {meant}?" if meant else "")


def test_version():
    assert asyncio.run(http.Api().json("GET", "/version")) == (200, {"version": "0.1.0"})


def test_tokenize_and_detokenize():
    async def main():
        api = http.Api()
        _, answer = await api.json("POST", "/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True})
        assert answer["count"] == 3 and answer["max_model_len"] == 200 and answer["token_strs"] == ["h", "Ã", "©"]
        _, text = await api.json("POST", "/detokenize", {"tokens": answer["tokens"]})
        assert text == {"prompt": "hé"}
        _, answer = await api.json("POST", "/tokenize", HELLO)
        assert api.client.tokenizer.decode(answer["tokens"]) == "<user>hi<assistant>" and answer["token_strs"] is None
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", **HELLO}),
            ("/tokenize", {"prompt": 3}),
            ("/tokenize", {**HELLO, "chat_template": "x"}),
            ("/tokenize", {**HELLO, "media_io_kwargs": {"image": {}}}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}),
        ]:
            assert (await api.json("POST", path, body))[0] == 400, body

    asyncio.run(main())


def test_tokenizing_much_goes_off_the_loop():
    async def main():
        api = http.Api()
        text = "abc " * 4000
        _, answer = await api.json("POST", "/tokenize", {"prompt": text, "return_token_strs": True})
        assert answer["count"] == len(answer["token_strs"]) == 16000
        assert await api.json("POST", "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})
        status, answer = await api.json("POST", "/detokenize", {"tokens": [*answer["tokens"], 300]})
        assert status == 400 and answer["error"]["param"] == "tokens"
        assert await api.json("POST", "/detokenize", {"tokens": []}) == (200, {"prompt": ""})

    asyncio.run(main())


def test_tokenizer_info():
    status, answer = asyncio.run(http.Api().json("GET", "/tokenizer_info"))
    assert status == 200 and answer == {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def test_unknown_paths_methods_and_types():
    async def main():
        api = http.Api()
        for path in ("/nope", "/v1", "/v1/chat/completions/", "//health", "/health/", "/%68ealth", "http://a@x/health"):
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


def test_the_type_of_a_body_that_is_not_read_does_not_matter_but_the_page_it_comes_from_does():
    """aiohttp, and so `vllm bench serve --profile`, announces bytes where it sends none."""

    async def main():
        api, mine = http.Api(), http.Api(cors=Cors(allowed_origins=["https://mine.example"]))
        for path in ("/start_profile", "/stop_profile", "/reset_prefix_cache", "/ping"):
            assert (await api.ask("POST", path, b"", {"Content-Type": "application/octet-stream"})).status == 200, path
            assert (await mine.ask("POST", path, b"", {"Origin": "https://mine.example"})).status == 200, path
            assert (await mine.ask("POST", path, b"", {"Origin": "https://other.example"})).status == 403, path

    asyncio.run(main())
