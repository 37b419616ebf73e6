"""A tiny Qwen3-VL served whole: images through every API, and answers equal to transformers'."""

import asyncio
import base64
import io
import os
import signal
import struct
import time
import zlib

import pytest
import seeing_model
from PIL import Image
from serving import SMALL, Served

from quire import LLM, SamplingParams
from quire.frontend.client.async_client import AsyncClient

NAME = "qwen3-vl"
A, B = seeing_model.image(90, 60, 1), seeing_model.image(40, 150, 2)
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
COUNT = 24


def user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n"


ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("media")
    (made / "b.png").write_bytes(seeing_model.png(B))
    (made / "text.txt").write_text("no image")
    (made / "out.png").symlink_to("/etc/hostname")
    return made


@pytest.fixture(scope="module")
def server(folder):
    arguments = ("--max-model-len", "512", "--allowed-local-media-path", str(folder), "--limit-mm-per-prompt", '{"image": 3}')
    with Served(str(seeing_model.seeing(NAME)), *SMALL, *arguments, *MORE) as served:
        served.ready()
        yield served


MORE = ("--allowed-media-domains", "example.invalid", "--trust-request-mm-kwargs")


def encoded(image):
    return base64.b64encode(seeing_model.png(image)).decode()


def url(image):
    return f"data:image/png;base64,{encoded(image)}"


def part(image_url, **more):
    return {"type": "image_url", "image_url": {"url": image_url, **more}}


def chat(server, content, **more):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    return server.ask("POST", "/v1/chat/completions", {**body, "return_token_ids": True, **more})


def expected(prompt, images):
    return seeing_model.reference_ids(NAME, prompt, images, COUNT)


def test_answers_equal_transformers(server):
    cases = [
        ([part(url(A)), {"type": "text", "text": "hello"}], f"{SEEN}hello", [A]),
        (
            [part(url(A)), part(url(B)), {"type": "text", "text": "the cat"}, part(url(A))],
            f"{SEEN}{SEEN}the cat{SEEN}",
            [A, B, A],
        ),
        ([{"type": "text", "text": "hello world"}], "hello world", []),
    ]
    for content, text, images in cases:
        for _ in range(2):  # the second time cached
            answer = chat(server, content).json()
            ids, tokens = expected(user(text) + ASSISTANT, images)
            assert answer["prompt_token_ids"] == ids
            assert answer["choices"][0]["token_ids"] == tokens
    assert len(set(tokens)) >= 5
    assert answer["usage"]["prompt_tokens_details"].get("multimodal_tokens") is None
    details = chat(server, cases[0][0]).json()["usage"]["prompt_tokens_details"]
    assert details["multimodal_tokens"] == {"image": 6}
    assert server.metric("mm_cache_hits_total") > 0


def test_a_text_that_spells_a_media_token_means_text(server):
    answer = chat(server, [part(url(A)), {"type": "text", "text": "a <|image_pad|> b<|vision_end|>"}]).json()
    ids = answer["prompt_token_ids"]
    assert ids.count(500) == 6 and ids.count(502) == 1
    backend = seeing_model.tokenizer()
    text = backend.decode([i for i in ids if i != 500], skip_special_tokens=False)
    assert "a <|image_pad|> b<|vision_end|>" in text


def test_other_apis_make_the_same_prompt(server):
    ids, _ = expected(user(f"{SEEN}hello") + ASSISTANT, [A])
    text = chat(server, [part(url(A)), {"type": "text", "text": "hello"}]).json()["choices"][0]["message"]["content"]
    sampling = {"temperature": 0}
    answer = server.ask("POST", "/v1/responses", {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(A)},
                                               {"type": "input_text", "text": "hello"}]}],
        "max_output_tokens": COUNT, **sampling,
    }).json()  # fmt: skip
    assert answer["usage"]["input_tokens"] == len(ids)
    follow = server.ask(
        "POST", "/v1/responses", {"input": "hello", "previous_response_id": answer["id"], "max_output_tokens": 1}
    )
    assert follow.status == 200 and follow.json()["usage"]["input_tokens"] > len(ids) + 5
    source = {"type": "base64", "media_type": "image/png", "data": encoded(A)}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "hello"}]}]
    answer = server.ask("POST", "/v1/messages", {"messages": messages, "max_tokens": COUNT, **sampling}).json()
    assert answer["usage"]["input_tokens"] + answer["usage"].get("cache_read_input_tokens", 0) == len(ids)
    counted = server.ask("POST", "/v1/messages/count_tokens", {"messages": messages}).json()
    assert counted["input_tokens"] == len(ids)
    answer = server.ask("POST", "/api/chat", {
        "messages": [{"role": "user", "content": "hello", "images": [encoded(A)]}], "stream": False,
        "options": {"num_predict": COUNT, "temperature": 0},
    }).json()  # fmt: skip
    assert answer["prompt_eval_count"] == len(ids)
    assert text.startswith(answer["message"]["content"][:4])
    answer = server.ask("POST", "/api/generate", {"prompt": "hello", "images": [encoded(A)], "stream": False,
                                                  "options": {"num_predict": 2}}).json()  # fmt: skip
    assert answer["prompt_eval_count"] == len(ids)
    content = [part(url(A)), {"type": "text", "text": "hello"}]
    answer = server.ask("POST", "/tokenize", {"messages": [{"role": "user", "content": content}]}).json()
    assert answer["tokens"] == ids


def test_images_in_results_of_tools(server):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(B)}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "see"}, {"type": "image", "source": source}],
    }
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = server.ask("POST", "/v1/messages", {"messages": messages, "max_tokens": 2})
    assert answer.status == 200, answer
    result["content"][1] = {"type": "image", "source": {**source, "data": "AAAA"}}
    broken = server.ask("POST", "/v1/messages", {"messages": messages, "max_tokens": 2})
    assert broken.status == 400 and "messages[2].content[0].content[1]: the image" in broken.error["message"]
    items = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": url(B)}]},
    ]
    assert server.ask("POST", "/v1/responses", {"input": items, "max_output_tokens": 2}).status == 200
    items[2]["output"].insert(0, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"})
    broken = server.ask("POST", "/v1/responses", {"input": items, "max_output_tokens": 2})
    assert (broken.status, broken.error["param"]) == (400, "input[2].output[0]")


def test_files(server, folder):
    assert chat(server, [part(f"file://{folder}/b.png")]).status == 200
    for path in ("text.txt", "out.png", "../b.png", "missing.png", "", "%00"):
        answer = chat(server, [part(f"file://{folder}/{path}")])
        assert answer.status == 400 and answer.error["param"] == "messages[0].content[0]", (path, answer)
        assert str(folder) not in answer.error["message"]
    assert chat(server, [part("file:///dev/zero")]).status == 400


def test_large_bodies_are_cut(server):
    large = seeing_model.image(400, 300, 5)  # 360 kB
    content = [{"type": "text", "text": "x"}, part(url(large)), part(url(A))]
    expected_ids, _ = expected(user(f"x{SEEN}{SEEN}") + ASSISTANT, [large, A])
    assert chat(server, content).json()["prompt_token_ids"] == expected_ids
    source = {"type": "base64", "media_type": "image/png", "data": encoded(large)}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": source},
                                             {"type": "image", "source": {**source, "data": encoded(A)}}]}]  # fmt: skip
    assert server.ask("POST", "/v1/messages/count_tokens", {"messages": messages}).json()["input_tokens"] == len(expected_ids)
    answer = server.ask("POST", "/api/chat", {"messages": [{"role": "user", "content": "x", "images": [encoded(large)] * 2}],
                                              "stream": False, "options": {"num_predict": 1}})  # fmt: skip
    assert answer.status == 200
    given = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url(large)}]}], "max_output_tokens": 1}
    first = server.ask("POST", "/v1/responses", given)
    kept = server.ask("GET", f"/v1/responses/{first.json()['id']}/input_items").json()
    assert kept["data"][0]["content"][0]["image_url"] == url(large)


def refused(server, image_url, **more):
    answer = chat(server, [{"type": "text", "text": "x"}, part(image_url, **more)])
    assert 400 <= answer.status < 500 and answer.error["param"] == "messages[0].content[1]", answer
    return answer.error


@pytest.mark.parametrize(
    "address",
    ["http://2130706433/a", "http://0x7f.1/a", "http://127.0.0.1/a", "http://[::ffff:127.0.0.1]/a", "http://[::1]/a",
     "http://example.invalid@127.0.0.1/a", "http://example.invalid\\@127.0.0.1/a", "http://example.invalid:22/a",
     "http://169.254.169.254/latest", "ftp://example.invalid/a", "http:/example.invalid/a", "http://example.org/a.png",
     "//example.invalid/a", "gopher://example.invalid", "http://example.invalid/a b", "javascript:alert(1)", "x"],
)  # fmt: skip
def test_addresses_that_are_not_allowed(server, address):
    refused(server, address)


def test_errors_name_the_part(server):
    assert "JPEG" in refused(server, "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode())["message"]
    refused(server, "data:image/png,abc")
    refused(server, "data:image/png;base64,%%%")
    refused(server, url(A), detail="enormous")
    refused(server, "data:image/png;base64," + encoded(A)[:200])
    many = chat(server, [part(url(A))] * 4)
    assert many.status == 400 and many.error["code"] == "too_many_media"
    video = chat(server, [{"type": "video_url", "video_url": {"url": "x"}}])
    assert video.status == 400 and "video_url" in video.error["message"]
    absent = ({"type": "image_url", "uuid": "a"}, {"type": "image_url", "image_url": None, "uuid": "a"})
    for other in (*absent, {"type": "hologram"}, {"image_url": {"url": url(A)}}, {"type": 5}, {"type": "image_embeds"}):
        answer = chat(server, [{"type": "text", "text": "x"}, part(url(A)), other])
        assert (answer.status, answer.error["param"]) == (400, "messages[0].content[2]"), answer
        assert answer.error["code"] == "unsupported_value" and "text only" not in answer.error["message"]
    cut = chat(server, [part(url(A))], truncate_prompt_tokens=4)
    assert cut.status == 400 and cut.error["param"] == "truncate_prompt_tokens"
    raw = server.ask("POST", "/api/generate", {"prompt": "x", "raw": True, "images": [encoded(A)]})
    assert raw.status == 400


def test_settings_of_a_request(server):
    content = [part(url(A)), {"type": "text", "text": "hello"}]
    for options, count in ((None, 6), ({"max_pixels": 28 * 28 * 2}, 1), ({}, 6)):
        answer = chat(server, content, mm_processor_kwargs=options).json()
        assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": count}
    body = {"messages": [{"role": "user", "content": content}], "mm_processor_kwargs": {"max_pixels": 28 * 28 * 2}}
    assert server.ask("POST", "/tokenize", body).json()["tokens"].count(500) == 1
    for options in ({"patch_size": 7}, {"max_pixels": 0}):
        answer = chat(server, content, mm_processor_kwargs=options)
        assert answer.status == 400 and answer.error["param"] == "mm_processor_kwargs"


def test_looks_among_images_seen_before_are_counted(server):
    new = seeing_model.image(70, 61, 99)
    queries, hits = (server.metric(f"mm_cache_{name}_total") for name in ("queries", "hits"))
    assert chat(server, [part(url(new)), part(url(A))]).status == 200
    assert chat(server, [part(url(new)), {"type": "text", "text": "again"}]).status == 200
    assert server.metric("mm_cache_queries_total") == queries + 3
    assert server.metric("mm_cache_hits_total") == hits + 2


def test_low_detail_scales_down(server):
    large = seeing_model.image(1200, 1000, 7)
    low = chat(server, [part(url(large), detail="low")])
    assert low.status == 200


def test_what_the_model_takes_is_said(server):
    assert server.ask("GET", "/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    assert "vision" in server.ask("POST", "/api/show", {}).json()["capabilities"]


def test_uploaded_files(server):
    boundary = "x"
    form = (
        (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--{boundary}\r\n'
            'Content-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
        ).encode()
        + seeing_model.png(A)
        + f"\r\n--{boundary}--\r\n".encode()
    )
    made = server.ask("POST", "/v1/files", form, {"Content-Type": f"multipart/form-data; boundary={boundary}"}).json()
    content = [{"type": "input_image", "file_id": made["id"]}, {"type": "text", "text": "hello"}]
    ids, _ = expected(user(f"{SEEN}hello") + ASSISTANT, [A])
    assert chat(server, content).json()["prompt_token_ids"] == ids
    missing = chat(server, [{"type": "input_image", "file_id": "file-nothing"}])
    assert missing.status == 400 and missing.error["code"] == "file_not_found"


def data_url(data):
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def test_a_child_that_is_killed_is_replaced(server):
    os.kill(server.pids("quire.frontend.media.child")[0], signal.SIGKILL)
    assert chat(server, [part(url(seeing_model.image(50, 50, 11)))]).status == 200
    assert chat(server, [part(url(seeing_model.image(50, 50, 12)))]).status == 200


def bomb():
    body = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(1 << 20))
    chunks = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (body, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def gif_of_many_frames():
    file = io.BytesIO()
    Image.new("P", (8, 8)).save(file, "GIF")
    whole = file.getvalue()
    begin = whole.index(b"\x2c")
    return whole[:begin] + whole[begin:-1] * 20_000 + whole[-1:]


HOSTILE = {
    "bomb": bomb(),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "pdf": b"%PDF-1.7\n1 0 obj\n",
    "empty": b"\x89PNG\r\n\x1a\n",
    "polyglot": b"GIF89a" + b"<script>" * 100,
    "tar": b"\0" * 2048,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_soon(server, name):
    began = time.monotonic()
    error = refused(server, data_url(HOSTILE[name]))
    assert time.monotonic() - began < 5.0  # two on a machine at rest
    assert error["code"] == "invalid_media" and "Error" not in error["message"] and "/" not in error["message"]


def test_strange_images_are_answered(server):
    assert chat(server, [part(data_url(gif_of_many_frames()))]).status == 200
    thin = seeing_model.image(1, 16384)
    assert chat(server, [part(url(thin))]).status == 400  # no side may be 200 times the other
    assert chat(server, [part(url(seeing_model.image(1, 1)))]).status == 200
    file = io.BytesIO()
    A.convert("CMYK").save(file, "JPEG")
    assert chat(server, [part(data_url(file.getvalue()))]).status == 200


def params(**more):
    return SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, **more)


def test_a_client_in_python(server):
    ids, tokens = expected(user(f"{SEEN}hello") + ASSISTANT, [A])
    prompt = {"prompt": user(f"{SEEN}hello") + ASSISTANT, "multi_modal_data": {"image": A}}
    messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": A}, {"type": "text", "text": "hello"}]}]

    async def ask():
        async with AsyncClient(server.engine_address()) as client:
            for outputs in (client.generate(prompt, params()), client.chat(messages, params())):
                *_, output = [output async for output in outputs]
                assert output.prompt_token_ids == ids and output.outputs[0].token_ids == tokens

    asyncio.run(ask())


@pytest.mark.slow
def test_offline(tmp_path):
    (tmp_path / "a.png").write_bytes(seeing_model.png(A))
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 256, "cpu_kv_cache_gib": 0.05}
    prompt = user(f"{SEEN}hello{SEEN}") + ASSISTANT
    ids, tokens = expected(prompt, [A, B])
    with LLM(str(seeing_model.seeing(NAME)), limit_mm_per_prompt={"image": 2}, **options) as llm:
        images = ([A, B], [str(tmp_path / "a.png"), B.convert("RGBA")], [(tmp_path / "a.png").read_bytes(), url(B)])
        for output in llm.generate(
            [{"prompt": prompt, "multi_modal_data": {"image": list(each)}} for each in images], params()
        ):
            assert output.prompt_token_ids == ids and output.outputs[0].token_ids == tokens
        content = [{"type": "image", "image": A}, {"type": "text", "text": "hello"}, part(url(B))]
        (output,) = llm.chat([{"role": "user", "content": content}], params())
        assert output.outputs[0].token_ids == tokens
        for wrong in ({"image": [A]}, {"image": [A, B, A]}, {"audio": A}, {"image": [1, 2]}, {"image": ["/nothing.png", B]}, 3):
            with pytest.raises(ValueError, match="prompt 0"):
                llm.generate([{"prompt": prompt, "multi_modal_data": wrong}], params())


SLOW = ("glm4.1v", "internvl", "gemma3", "qwen2.5-vl", "qwen3.5", "mistral-small-3", "gemma4-unified")
OTHER_FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", ["gemma4", *OTHER_FAMILIES])
def test_families_from_an_image_to_text(name):
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 256, "cpu_kv_cache_gib": 0.05}
    shown = seeing_model.in_template(name)
    prompt = user(f"{shown}hello{shown}") + ASSISTANT
    ids, tokens = seeing_model.reference_ids(name, prompt, [A, B], COUNT)
    bias = {"logit_bias": {500: -100.0, 503: -100.0}} if name.startswith("gemma4") else {}
    with LLM(str(seeing_model.seeing(name)), **options) as llm:
        content = [{"type": "image", "image": A}, {"type": "text", "text": "hello"}, {"type": "image", "image": B}]
        for _ in range(2):
            (output,) = llm.chat([{"role": "user", "content": content}], params(**bias))
            assert output.prompt_token_ids == ids and output.outputs[0].token_ids == tokens
        (output,) = llm.generate({"prompt": prompt, "multi_modal_data": {"image": [A, B]}}, params(**bias))
        assert output.prompt_token_ids == ids and output.outputs[0].token_ids == tokens
