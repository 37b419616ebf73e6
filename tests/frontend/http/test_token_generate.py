"""POST /inference/v1/generate: ids in, ids out."""

import asyncio
import json

import fake_client as http
import pytest
from fake_client import NUM_TOKENS

from quire.frontend.client.outputs import Delta

PATH = "/inference/v1/generate"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


def test_an_answer_in_one_piece():
    async def main():
        api = http.Api()
        ids = api.client.tokenizer.encode(api.client.OUTPUT)
        params = {"n": 2, "temperature": 0.5, "max_tokens": 30, "logprobs": 1, "prompt_logprobs": 1, "stop_token_ids": [7]}
        status, answer = await api.json(
            "POST", PATH, {**BODY, "sampling_params": params, "request_id": "job-1", "model": "tiny"}
        )
        assert status == 200 and answer["request_id"] == "generate-tokens-job-1" and answer["model"] == "tiny"
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        for choice in answer["choices"]:
            assert choice["token_ids"] == ids and choice["finish_reason"] == "stop"
            assert choice["logprobs"]["content"][0]["token"] == f"token_id:{ids[0]}"
        assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS
        assert answer["prompt_logprobs"][0] is None and answer["kv_transfer_params"] is None
        sent = api.client.streams[-1]
        assert sent.ids == [1, 2, 3] and sent.params.temperature == 0.5 and not sent.params.detokenize
        _, answer = await api.json("POST", PATH, BODY)
        sent = api.client.streams[-1].params
        assert sent.max_tokens is None and sent.temperature == 1.0 and answer["prompt_logprobs"] is None
        await api.json("POST", PATH, {**BODY, "sampling_params": {"stop": ["x"]}, "priority": 3, "cache_salt": "s"})
        sent = api.client.streams[-1]
        assert sent.params.detokenize and sent.options["priority"] == 3 and sent.options["cache_salt"] == "s"
        rendered = {"output_mode": "tokens", "reasoning_ended": False, "parse_context": {}, "token_offsets": [[0, 1]]}
        _, answer = await api.json("POST", PATH, {**BODY, **rendered, "return_token_ids": True})
        assert answer["prompt_token_ids"] == [1, 2, 3] and answer["choices"][0]["stop_reason"] is None

    asyncio.run(main())


@pytest.mark.parametrize(
    "usage",
    [{}, {"continuous_usage_stats": True}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
)
def test_a_stream(usage):
    async def main():
        api = http.Api()
        asked = {"sampling_params": {"n": 2}, "stream_options": usage, "return_token_ids": True}
        *chunks, done = await api.events(PATH, {**BODY, **asked})
        assert done == "[DONE]" and [chunk.get("prompt_token_ids") for chunk in chunks[:2]] == [[1, 2, 3], None]
        if usage.get("include_usage"):
            last = chunks.pop()
            assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * NUM_TOKENS
        assert all((chunk["usage"] is not None) == (len(usage) == 2) for chunk in chunks)
        ids = api.client.tokenizer.encode(api.client.OUTPUT)
        for index in range(2):
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [i for c in mine for i in c["token_ids"]] == ids
            assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1) and mine[-1]["finish_reason"] == "stop"

    asyncio.run(main())


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_vllms_kind_of_output_asks_for_nothing(kind):
    api = http.Api()
    status, _ = asyncio.run(api.json("POST", PATH, {**BODY, "sampling_params": {"max_tokens": 3, "output_kind": kind}}))
    assert status == 200


def test_structured_outputs_as_vllm_writes_them():
    async def main():
        api = http.Api()
        given = {"json": None, "choice": ["a", "b"], "_backend": None, "_backend_was_auto": False, "disable_fallback": False}
        status, _ = await api.json("POST", PATH, {**BODY, "sampling_params": {"structured_outputs": given}})
        wanted = api.client.streams[-1].params.structured_outputs
        assert status == 200 and (wanted.kind, json.loads(wanted.text)) == ("choice", ["a", "b"])
        assert wanted.field == "structured_outputs.choice"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": "x"}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"n": 0}}, "n"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_k": "many"}}, "sampling_params.top_k"),
        ({"sampling_params": {"structured_outputs": {"json": "{"}}}, "structured_outputs"),
        ({"sampling_params": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs"),
        ({"sampling_params": {"structured_outputs": {"jsn": {}}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
        ({"sampling_params": {"logits_processors": ["a:B"]}}, "logits_processors"),
        ({"features": {"x": 1}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"output_mode": "text"}, "output_mode"),
        ({"reasoning_ended": False, "sampling_params": {"structured_outputs": {"regex": "a"}}}, "reasoning_ended"),
        ({"sampling_params": {"watermarking": True}}, "watermarking"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, "logprob_token_ids"),
        ({"sampling_params": {"repetition_detection": {"max_pattern_size": 4}}}, "repetition_detection"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"request_id": "a b"}, "request_id"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_what_is_wrong_is_named(change, param):
    status, answer = asyncio.run(http.Api().json("POST", PATH, {**BODY, **change}))
    assert status == 400 and answer["error"]["param"] == param


@pytest.mark.parametrize("value", [False, "", {}, []])
@pytest.mark.parametrize("name", ["guided_decoding", "logits_processors"])
def test_what_asks_for_nothing_is_taken(name, value):
    status, _ = asyncio.run(http.Api().json("POST", PATH, {**BODY, "sampling_params": {name: value}}))
    assert status == 200


def test_a_client_that_leaves_ends_its_request():
    async def main():
        api = http.Api()
        api.client.speak = lambda stream: stream.push(Delta(0, "a", [1], num_tokens=1))
        wire = api.wire()
        await wire.talk(api.encode("POST", PATH, {**BODY, "stream": True}))
        assert json.loads(wire.answers()[0].body[6:])["choices"][0]["token_ids"] == [1]
        metrics = (await api.ask("GET", "/metrics")).body.decode()
        (count,) = [line for line in metrics.splitlines() if line.startswith("vllm:time_to_first_token_seconds_count{")]
        assert count.endswith(" 1.0")  # while it still runs
        wire.connection.connection_lost(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert api.client.streams[0].cancelled

    asyncio.run(main())


def test_a_salt_may_be_as_long_as_in_the_other_routes():
    """A salt that names a tenant's prefixes must work in every route, or they are computed twice."""
    api = http.Api()
    assert asyncio.run(api.json("POST", PATH, {**BODY, "cache_salt": "x" * 1024}))[0] == 200
    status, answer = asyncio.run(api.json("POST", PATH, {**BODY, "cache_salt": "x" * 1025}))
    assert (status, answer["error"]["param"]) == (400, "cache_salt")
