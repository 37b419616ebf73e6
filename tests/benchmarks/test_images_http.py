"""The benchmark of images over HTTP, against a server that answers by script, and the folders that it is run with."""

import asyncio
import contextlib
import io
import json

import images_http
import media_shapes
import numpy as np
from PIL import Image
from sse_sink import TEXT, chunk
from tokenizers import Tokenizer

from quire.frontend.media.families import family_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Scripted:
    """Two events a request, and the tokens of its prompt: an image has 70, a text as many as ids. bodies: all that came."""

    def __init__(self):
        self.bodies, self.running, self.most, self._tasks = [], 0, 0, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=1 << 24)
        return self, f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _answer(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            await self._answers(reader, writer)

    async def _answers(self, reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split()[1].decode()
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append((path, body))
            self.running += 1
            self.most = max(self.most, self.running)
            tokens = len(body["prompt"]) if "prompt" in body else 70
            usage = chunk(b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":2}}\n\n' % tokens)
            await asyncio.sleep(0)
            writer.write(HEAD + TEXT + TEXT + usage + b"0\r\n\r\n")
            self.running -= 1


def asked(url, *more):
    return images_http.arguments(["--url", url, "--model", "m", "--side", "40", "--repeats", "3", "--warmup", "1", *more])


def test_requests_one_at_a_time():
    async def run():
        async with Scripted() as (server, url):
            found = await images_http.idle(asked(url))
            again = await images_http.again(asked(url))
            return server, found, again

    server, found, again = asyncio.run(run())
    assert found["tokens"] == again["tokens"] == 70 and found["image_over_text"] > 0
    idle, repeated = server.bodies[:8], server.bodies[8:]
    assert [path for path, _ in idle] == ["/v1/chat/completions"] * 4 + ["/v1/completions"] * 4
    urls = {body["messages"][0]["content"][0]["image_url"]["url"] for _, body in idle[:4]}
    assert len(urls) == 4 and all(len(body["prompt"]) == 70 for _, body in idle[4:])  # all different, texts as long
    assert len({json.dumps(body) for _, body in repeated}) == 2 and len(repeated) == 8


def test_requests_at_once_and_by_rate():
    async def run():
        async with Scripted() as (server, url):
            asker = images_http.Asker(asked(url), (1,))
            share = images_http.Share("answers", 0, 12, 4, tokens=30)
            times = await images_http.closed(asker, list(images_http.requests_of(asker, share, 40)), 4)
            late = await images_http.opened(asker, [asker.text(5, 1)] * 4, 200.0)
            asker.close()
            return server, times, late

    server, times, late = asyncio.run(run())
    assert len(times) == 12 and 1 < server.most <= 4 and all(sent < first <= end for sent, first, end, *_ in times)
    assert all(len(body["messages"][0]["content"][1]["text"]) == 30 for _, body in server.bodies[:12])
    assert max(sent for sent, *_ in late) - min(sent for sent, *_ in late) >= 0.014


def test_shares_are_all_of_the_requests():
    args = asked("http://127.0.0.1:9", "--processes", "3")
    shares = images_http.split(args, "pages", 10, 8)
    assert sum(share.count for share in shares) == 10 and sum(share.at_once for share in shares) == 8 and len(shares) == 3


def test_an_error_is_the_end(capsys):
    assert images_http.main(["--url", "http://127.0.0.1:9", "--model", "m", "--parts", "again"]) == 1
    assert "cannot connect" in capsys.readouterr().out


def test_images_are_what_they_say():
    rng = np.random.default_rng(0)
    pages = [images_http.page(rng, 300, 200) for _ in range(2)]
    photo = Image.open(io.BytesIO(images_http.photo(rng, 96)))
    assert pages[0] != pages[1] and Image.open(io.BytesIO(pages[0])).size == (300, 200)
    assert photo.format == "JPEG" and photo.size == (96, 96)


def test_folders_name_the_media_tokens(tmp_path):
    text = media_shapes.tokenizer_text()
    tokenizer = Tokenizer.from_str(text)
    for name, config in media_shapes.SHAPES.items():
        media_shapes.write(tmp_path / name, config, text)
        assert family_of({"config.json": (tmp_path / name / "config.json").read_bytes()}).token == "<|image_pad|>"
        assert tokenizer.encode("a<|image_pad|><|video_pad|>b").ids[1:3] == [config["image_token_id"], config["video_token_id"]]
        assert tokenizer.token_to_id("<|vision_start|>") == config["vision_start_token_id"]
        assert media_shapes.tiny(config)["vision_config"].keys() == config["vision_config"].keys()
