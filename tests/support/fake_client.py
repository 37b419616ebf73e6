"""The engine as HTTP routes see it: a client driven by the test, and requests to the real application over a fake wire."""

import asyncio
import json
import time

import numpy as np
import tokenizers
from fake_http import Answer, Wire

from quire.frontend.client.outputs import Delta, Logprob, RequestMetrics
from quire.frontend.client.stream import InvalidRequest, TooLong
from quire.frontend.http.api.access import access_of
from quire.frontend.http.api.app import App
from quire.frontend.http.api.services import Services
from quire.frontend.media.options import NO_MEDIA_OPTIONS
from quire.frontend.text.request_templates import ToRender, render_here
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import EngineLimits, Heartbeat, Welcome
from quire.ipc.messages.utilities import (
    GetServerInfo,
    ProfileDone,
    ResetDone,
    ResetPrefixCache,
    ServerInfo,
    StartProfile,
    StopProfile,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
NUM_TOKENS = 21  # of FakeClient.OUTPUT


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(generation_config=None, template: str = TEMPLATE, special: tuple[str, ...] = ()) -> Tokenizer:
    """One token per byte, ids in the order of GPT-2's alphabet, then <s> and </s>, then more special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", *special])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, config, {"default": template}, generation_config)


class FakeStream:
    """A Stream whose deltas the test pushes."""

    def __init__(self, client, ids, params, options) -> None:
        self._client = client
        self.ids, self.params, self.options = list(ids), params, options
        self.id, self.request_name = len(client.streams), options.get("request_name", "")
        self.num_prompt_tokens, self.num_cached_tokens = len(ids), None
        self.prompt_logprobs = None
        self.items = options.get("items", ())
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.finished = self.cancelled = False
        self.error: Exception | None = None
        self.shown: frozenset[int] = frozenset()  # special tokens
        self.marks: dict[int, str] = {}
        self.turns: list[list[Delta]] = []
        self.news = asyncio.Event()

    def show_special_tokens(self, token_ids: frozenset[int]) -> None:
        self.shown = token_ids

    def mark_tokens(self, marks: dict[int, str]) -> None:
        self.marks = marks

    def push(self, *deltas: Delta) -> None:
        """One turn, or, if the last one was not taken, more of it."""
        self.num_cached_tokens = self.num_cached_tokens or 0
        self.metrics.first_token_time = self.metrics.first_token_time or time.time()
        self.metrics.queue_s = 0.01
        self.metrics.last_token_time = time.time()
        self.turns.append(list(deltas))
        self.news.set()

    def end(self, error: Exception | None = None) -> None:
        self.finished, self.error = True, error
        self.metrics.finished_time = time.time()
        self.news.set()
        self._client.news.set()

    def __aiter__(self):
        return self

    async def __anext__(self) -> list[Delta]:
        while not self.turns:
            if self.error is not None:
                raise self.error
            if self.finished:
                raise StopAsyncIteration
            self.news.clear()
            await self.news.wait()
        return self.turns.pop(0)

    async def collect(self) -> list[Delta]:
        merged = [Delta(i, "", [], None if self.params.logprobs is None else []) for i in range(self.params.n)]
        async for deltas in self:
            for d in deltas:
                m = merged[d.index]
                m.text += d.text
                m.token_ids = [*m.token_ids, *d.token_ids]
                m.logprobs = None if d.logprobs is None else [*(m.logprobs or []), *d.logprobs]
                m.finish_reason, m.stop_reason, m.num_tokens = d.finish_reason, d.stop_reason, d.num_tokens
        return merged

    def cancel(self) -> None:
        if not self.finished:
            self.finished = self.cancelled = True
            self.news.set()
            self._client.news.set()


class FakeClient:
    """What AsyncClient is to the routes. `speak` answers a stream at once with OUTPUT, token by token; set it to None to push
    by hand."""

    OUTPUT = 'Grüße "dich"\n\u2028✓'

    def __init__(self, generation_config=None, template: str = TEMPLATE, special: tuple[str, ...] = ()) -> None:
        self.tokenizer = make_tokenizer(generation_config, template, special)
        limits = EngineLimits(max_model_len=200, vocab_size=300, max_num_seqs=8, max_logprobs=20)
        self.welcome = Welcome(
            epoch=1, protocol=1, served_model_names=["tiny", "org/tiny"], limits=limits, files=[], eos_token_ids=[257],
            version="0.1.0", created=1700000000, step_timeout_s=60.0,
        )  # fmt: skip
        self.heartbeat = Heartbeat(1, 0.0, 3, 4, 0.25, 100, 40, 50, 2, 1, True)
        self.heartbeat_time = time.monotonic()
        self.is_connected = True
        self.media, self.media_options = None, NO_MEDIA_OPTIONS
        self.engines = (self,)
        self.adapters: dict = {}
        self.problem: str | None = None
        self.has_profiler = True
        self.streams: list[FakeStream] = []
        self.submit_error: Exception | None = None
        self.speak = self.say_output
        self.news = asyncio.Event()  # a stream was submitted, or has ended

    async def until(self, condition) -> None:
        """Until streams make it so."""
        async with asyncio.timeout(100):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def health(self) -> str | None:
        return self.problem

    @property
    def cache(self):
        return self.welcome.cache

    @property
    def num_requests(self) -> int:
        return sum(not stream.finished for stream in self.streams)

    async def utility(self, call, kind):
        match call:
            case StartProfile() | StopProfile() if self.has_profiler:
                return ProfileDone(["rank0.json.gz"] if isinstance(call, StopProfile) else [])
            case ResetPrefixCache():
                return ResetDone(not self.num_requests)
            case GetServerInfo():
                return ServerInfo({"model": "tiny", "seed": 0, "served_model_name": ["tiny"]})
        raise InvalidRequest("profiling needs a folder for its traces: start the engine with --profile-dir")

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= 10_000:
            return self.tokenizer.encode(text, add_special_tokens)
        if len(text) > 1_000 * self.welcome.limits.max_model_len:
            raise TooLong(
                f"the prompt has {len(text)} characters, more than {self.welcome.limits.max_model_len} tokens can hold"
            )
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def encode_marked(self, text: str, add_special_tokens: bool, ends):
        return self.tokenizer.encode_marked(text, add_special_tokens, ends)

    def submit(self, prompt_token_ids, params, **options) -> FakeStream:
        if self.submit_error is not None:
            raise self.submit_error
        stream = FakeStream(self, prompt_token_ids, params, options)
        if (candidates := options.get("candidates")) is not None:  # a step of a beam search: the same for every beam
            stream.candidates = np.arange(candidates.num, dtype=np.int32), -np.arange(1, candidates.num + 1, dtype=np.float32)
            stream.push(Delta(0, "", [0], None, "length", None, 1))
            stream.end()
            return stream
        self.streams.append(stream)
        self.news.set()
        if self.speak is not None:
            self.speak(stream)
        return stream

    def say_output(self, stream: FakeStream) -> None:
        """Every child says OUTPUT, a turn for each character, of one to three tokens."""
        p = stream.params
        if p.prompt_logprobs is not None:
            stream.prompt_logprobs = [None, *(self.row(i, p.prompt_logprobs) for i in stream.ids[1:])]
        stream.num_cached_tokens = 4
        num_tokens = 0
        for char in self.OUTPUT:
            ids = self.tokenizer.encode(char, add_special_tokens=False)
            num_tokens += len(ids)
            rows = None if p.logprobs is None else [self.row(i, p.logprobs) for i in ids]
            stream.push(*(Delta(i, char, ids, rows, num_tokens=num_tokens) for i in range(p.n)))
        stream.push(*(Delta(i, "", [], None if rows is None else [], "stop", None, num_tokens) for i in range(p.n)))
        stream.end()

    def row(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        """The token is third; first and second are 10 and 11."""
        name = self.tokenizer.token_str
        row = {token_id: Logprob(-3.0, 3, name(token_id))}
        for rank, other in enumerate((10, 11, token_id, 12, 13)[:num_top], 1):
            row.setdefault(other, Logprob(-float(rank) if rank < 5 else float("-inf"), rank, name(other)))
        return row


async def render_at_once(wanted: ToRender, owner: str = "") -> str:
    return render_here(wanted)


class Api:
    """Requests to the real application over a fake wire, with a fake client behind it."""

    def __init__(self, client: FakeClient | None = None, **options) -> None:
        self.client = client or FakeClient()
        names = ("log_requests", "defaults", "parsers", "storage", "trust_request_chat_template", "render_own")
        names += ("key_limits", "request_timeout_s")
        of_services = {name: options.pop(name) for name in names if name in options}
        self.services = Services.make(self.client, **{"render_own": render_at_once, **of_services})
        of_access = ("api_keys", "admin_keys", "metrics_open", "allowed_hosts")
        self.access = access_of(**{name: options.pop(name) for name in of_access if name in options})
        self.app = App(self.services, access=self.access, **options)

    def wire(self) -> Wire:
        return Wire(self.app)

    @staticmethod
    def encode(method: str, path: str, body=None, headers: dict[str, str] | None = None) -> bytes:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "x", **({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
        if body is not None:
            fields["Content-Length"] = str(len(data))
        head = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data

    async def ask(self, method: str, path: str, body=None, headers=None) -> Answer:
        wire = self.wire()
        wire.feed(self.encode(method, path, body, headers))
        for _ in range(200):
            await asyncio.sleep(0)
            if wire.connection._task is None and wire.transport.sent:
                break
        else:  # a thread is at work
            while wire.connection._task is not None:
                await asyncio.wait([wire.connection._task])
        (answer,) = wire.answers(method)
        assert answer.complete
        return answer

    async def json(self, method: str, path: str, body=None, headers=None):
        answer = await self.ask(method, path, body, headers)
        return answer.status, json.loads(answer.body)

    async def events(self, path: str, body) -> list:
        answer = await self.ask("POST", path, {**body, "stream": True})
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer
        return parse_events(answer.body)


def parse_events(body: bytes) -> list:
    """Server-sent events as JSON values; "[DONE]" as itself."""
    events = body.decode().split("\n\n")
    assert events.pop() == ""
    assert all(e.startswith("data: ") and "\n" not in e for e in events)
    return [e[6:] if e == "data: [DONE]" else json.loads(e[6:]) for e in events]
