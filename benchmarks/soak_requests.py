"""Requests of `soak.py --kill`: a catalogue of which every answer is known, and the clients that send them.

Every distinct request is asked before the first kill; the answer is what every later one is compared with. Requests are greedy
or have a seed. They are streams and whole answers, chats with a template of their own, grammars, several choices, stored
responses and responses in the background, and lines of batches. Templates and schemas get another comment each time, so that
the processes that render templates and try grammars have work, and an engine meets no schema twice.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soak_ledger import Entry, Ledger, Observed, Stalls
from sse_client import Answer, Connection, Target, ask

SCHEMAS = 100  # that an engine has met before the first kill: more than it keeps compiled
PAUSE_S = 0.3  # after an error
POLL_S = 0.5
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WORDS = (
    "once",
    "upon",
    "a",
    "time",
    "there",
    "was",
    "little",
    "dog",
    "that",
    "liked",
    "to",
    "run",
    "in",
    "the",
    "garden",
    "ten",
)


@dataclass(frozen=True)
class Request:
    """key: the request's place in the catalogue."""

    key: int
    kind: str
    path: str
    body: dict[str, Any]

    def again(self, serial: int) -> dict[str, Any]:
        """The body, with a comment that changes no answer."""
        body = self.body
        if self.kind == "grammar":
            schema = {**SCHEMA, "description": f"number {serial}"}
            body = {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        if self.kind == "template":
            body = {**body, "chat_template": body["chat_template"] + "{# " + str(serial) + " #}"}
        return body


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 30},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
KINDS = ("stream", "seeded", "long", "chat", "template", "grammar", "whole", "several", "response")
STREAMED = ("stream", "seeded", "long", "chat", "template", "grammar")
OF_BATCHES = ("whole", "several")


def catalogue(model: str, max_model_len: int, tokens: int, each: int, seed: int, *, templates: bool) -> list[Request]:
    """`each` requests of every kind. tokens: of an answer at most. templates: whether the server takes one from a request."""
    rng, found = random.Random(seed), list[Request]()
    kinds = [kind for kind in KINDS if templates or kind != "template"]
    for number in range(each * len(kinds)):
        kind = kinds[number % len(kinds)]
        length = rng.randint(tokens // 2, tokens) if kind != "grammar" else tokens
        path, body = of_kind(kind, rng, length, max_model_len)
        found.append(Request(number, kind, path, {"model": model, **body}))
    return found


def of_kind(kind: str, rng: random.Random, length: int, max_model_len: int) -> tuple[str, dict[str, Any]]:
    """A path and a body without the model's name."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 30)))
    how: dict[str, Any] = {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 1.0, "seed": rng.randrange(10**6)}
    if kind == "response":
        return RESPONSES, {"input": text, "max_output_tokens": length, "temperature": 0.0}
    how |= {"max_tokens": length, "ignore_eos": True}
    if kind in STREAMED:
        how |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind in ("chat", "template"):
        body = {"messages": [{"role": "user", "content": text}], **how}
        return CHAT, body | ({"chat_template": TEMPLATE} if kind == "template" else {})
    if kind == "long":
        text = " ".join(rng.choice(WORDS) for _ in range(min(max_model_len // 4, 1500)))
    if kind == "seeded":
        how |= {"temperature": 0.8, "seed": rng.randrange(10**6), "top_p": 0.9, "repetition_penalty": 1.2}
    if kind == "grammar":
        how |= {"temperature": 1.0, "seed": rng.randrange(10**6), "ignore_eos": False}
    if kind == "several":
        how |= {"n": 2}
    return COMPLETIONS, {"prompt": text, **how}


def observed(request: Request, answer: Answer) -> Observed:
    """The text of an answer without an error."""
    if request.body.get("stream"):
        return Observed("".join(answer.texts or []), answer.output_tokens, f"{answer.finished} choices")
    return of_whole(json.loads(answer.body))


def of_whole(body: dict[str, Any]) -> Observed:
    if body.get("object") == "response":
        texts = [part.get("text", "") for item in body["output"] for part in item.get("content") or ()]
        return Observed("".join(texts), (body.get("usage") or {}).get("output_tokens", 0), body["status"])
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] or "" for choice in choices]
    return Observed("\0".join(texts), body["usage"]["completion_tokens"], " ".join(str(c["finish_reason"]) for c in choices))


class World:
    """The state that all clients share."""

    def __init__(self, target: Target, requests: list[Request], ledger: Ledger, clock: Callable[[], float], patience_s: float):
        self.target, self.requests, self.ledger, self.clock, self.patience_s = target, requests, ledger, clock, patience_s
        self.expected: dict[int, Observed] = {}
        self.stalls = Stalls()
        self.until = 0.0  # when clients stop, by `clock`
        self._serial = 0

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until

    def body(self, request: Request) -> dict[str, Any]:
        self._serial += 1
        return request.again(self._serial)

    async def learn(self, at_once: int) -> int:
        """Ask every request twice, alone among few and among many; returns how many answers were not the same. Raises
        RuntimeError if one fails."""
        first = await self._ask_all(min(4, at_once))
        second = await self._ask_all(at_once)
        self.expected = first
        return sum(first[key] != second[key] for key in first)

    async def fill_caches(self, num_engines: int, at_once: int) -> None:
        """Let each engine meet many schemas: a router chooses the engine. Raises RuntimeError if one fails."""
        requests, free = [request for request in self.requests if request.kind == "grammar"], asyncio.Semaphore(at_once)

        async def one(request: Request) -> None:
            async with free:
                answer = await self.once(request.path, self.body(request))
            if answer.error:
                raise RuntimeError(f"before any kill, a schema failed: {answer.error}")

        await asyncio.gather(*(one(requests[number % len(requests)]) for number in range(SCHEMAS * num_engines)))

    async def _ask_all(self, at_once: int) -> dict[int, Observed]:
        found, free = dict[int, Observed](), asyncio.Semaphore(at_once)

        async def one(request: Request) -> None:
            async with free:
                answer = await self.once(request.path, self.body(request), keep_texts=True)
            if answer.error:
                raise RuntimeError(f"before any kill, a request of kind {request.kind} failed: {answer.error}")
            found[request.key] = observed(request, answer)

        await asyncio.gather(*(one(request) for request in self.requests))
        return found

    async def once(self, path: str, body: dict[str, Any] | None = None, keep_texts: bool = False) -> Answer:
        """One request on a connection of its own; a GET without a body."""
        data = self.target.request(b"" if body is None else json.dumps(body).encode(), path)
        if not keep_texts:
            return await ask(self.target, data, self.patience_s)
        async with asyncio.timeout(self.patience_s):
            connection = await Connection.open(self.target)
            answer, done = connection.send(data)
            answer.texts = []
            await done
            connection.abort()
        return answer

    async def get(self, path: str, is_ready: Callable[[dict[str, Any]], bool], deadline: float) -> dict[str, Any] | str:
        """Poll until the answer is as wanted; failures of connections and 503 are asked again. Returns why not, as text."""
        last = "nothing came"
        while self.clock() < deadline:
            answer = await ask(self.target, self.target.request(path=path), 10.0)
            if not answer.error:
                said = json.loads(answer.body)
                if is_ready(said):
                    return said
                last = str(said.get("status"))
            elif answer.status not in (0, 200, 503):
                return answer.error
            else:
                last = answer.error
            await asyncio.sleep(POLL_S)
        return f"not within {self.patience_s:g} s: {last}"


class Client:
    """Sends requests of the catalogue one after the other, on one connection while it stays usable."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self._world, self._number = world, number
        self._random = random.Random(seed * 1000 + number)
        kinds = STREAMED if number % 4 else OF_BATCHES
        self._requests = [request for request in world.requests if request.kind in kinds]
        self._connection: Connection | None = None

    async def run(self) -> None:
        world = self._world
        while not world.is_over:
            request = self._random.choice(self._requests)
            entry = world.ledger.send(request.kind, world.clock())
            try:
                async with asyncio.timeout(world.patience_s):
                    answer = await self._ask(request)
            except TimeoutError:
                world.ledger.lose(entry, world.clock(), f"no end after {world.patience_s:g} s")
                self._drop()
                continue
            except OSError as error:
                answer = Answer(0.0)
                answer.error = f"cannot connect: {error}"
            self._judge(entry, request, answer)
            if answer.error:
                self._drop()
                await asyncio.sleep(PAUSE_S)
        world.stalls.pause(self._number)
        self._drop()

    async def _ask(self, request: Request) -> Answer:
        if self._connection is None or not self._connection.usable:
            self._connection = await Connection.open(self._world.target)
        body = json.dumps(self._world.body(request)).encode()
        answer, done = self._connection.send(self._world.target.request(body, request.path))
        answer.texts = []
        if request.body.get("stream"):
            answer.on_chunk = lambda: self._world.stalls.progress(self._number, self._world.clock())
        return await done

    def _judge(self, entry: Entry, request: Request, answer: Answer) -> None:
        world, expected = self._world, self._world.expected[request.key]
        if answer.error:
            world.ledger.error(entry, world.clock(), answer.status, answer.error)
        elif request.body.get("stream") and answer.finished > 1:
            world.ledger.double(entry, f"{answer.finished} choices ended in a stream of one")
        else:
            world.ledger.answer(entry, world.clock(), expected, observed(request, answer))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.abort()
        self._connection = None


class Responder:
    """Sends stored responses, in turns in the background, and reads them again."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, random.Random(seed)
        self._requests = [request for request in world.requests if request.kind == "response"]

    async def run(self) -> None:
        background = False
        while not self._world.is_over:
            background = not background
            await self._one(self._random.choice(self._requests), background)

    async def _one(self, request: Request, background: bool) -> None:
        world, kind = self._world, "background" if background else "response"
        entry = world.ledger.send(kind, world.clock())
        answer = await world.once(request.path, {**request.body, "background": background})
        if answer.error:
            if "TimeoutError" in answer.error:
                return world.ledger.lose(entry, world.clock(), answer.error)
            world.ledger.error(entry, world.clock(), answer.status, answer.error)
            return await asyncio.sleep(PAUSE_S)
        said = json.loads(answer.body)
        kept = await world.get(
            f"{RESPONSES}/{said['id']}",
            lambda said: said["status"] not in ("queued", "in_progress"),
            world.clock() + world.patience_s,
        )
        if isinstance(kept, str):
            return world.ledger.lose(entry, world.clock(), f"the response {said['id']} cannot be read: {kept}")
        if kept["status"] == "failed":
            error = kept.get("error") or {}
            text = "engine_down" if "engine" in str(error.get("message")) and "away" in str(error.get("message")) else ""
            return world.ledger.error(entry, world.clock(), 200, json.dumps(error) + (f' "{text}"' if text else ""))
        if not background and of_whole(kept) != of_whole(said):
            return world.ledger.double(entry, "the stored response is not the one that was answered")
        return world.ledger.answer(entry, world.clock(), world.expected[request.key], of_whole(kept))


class Batcher:
    """Sends batches of some lines one after the other; each line is an entry of the ledger."""

    def __init__(self, world: World, seed: int, lines: int = 6) -> None:
        self._world, self._random, self._num_lines = world, random.Random(seed), lines
        self._requests = [request for request in world.requests if request.kind in OF_BATCHES]

    async def run(self) -> None:
        while not self._world.is_over:
            if not await self._one():
                await asyncio.sleep(PAUSE_S)

    async def _one(self) -> bool:
        """One batch; returns whether it was accepted."""
        world = self._world
        requests = [self._random.choice(self._requests) for _ in range(self._num_lines)]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": request.path, "body": request.body}
            for number, request in enumerate(requests)
        ]
        made = world.ledger.send("batch", world.clock())
        entries = [world.ledger.send("batch line", world.clock()) for _ in lines]
        answer = await self._create("\n".join(json.dumps(line) for line in lines))
        if answer.error:  # it may have been made all the same, and then its id is lost
            world.ledger.error(made, world.clock(), answer.status, answer.error)
            for entry in entries:
                world.ledger.leave_out(entry, world.clock())
            return False
        is_over = ("completed", "failed", "expired", "cancelled")
        path = f"/v1/batches/{json.loads(answer.body)['id']}"
        said = await world.get(path, lambda said: said["status"] in is_over, world.clock() + 2 * world.patience_s)
        if isinstance(said, str):
            for entry in (made, *entries):
                world.ledger.lose(entry, world.clock(), f"{path}: {said}")
            return True
        expected = Observed("", len(lines), "completed")
        world.ledger.answer(made, world.clock(), expected, Observed("", said["request_counts"]["total"], said["status"]))
        await self._read(said, entries, requests)
        return True

    async def _create(self, content: str) -> Answer:
        target, edge = self._world.target, "----soak"
        head = f"--{edge}\r\nContent-Disposition: form-data; name="
        form = f'{head}"purpose"\r\n\r\nbatch\r\n{head}"file"; filename="in.jsonl"\r\n\r\n{content}\r\n--{edge}--\r\n'
        data = target.request(form.encode(), "/v1/files")
        data = data.replace(b"application/json", f"multipart/form-data; boundary={edge}".encode(), 1)
        answer = await ask(target, data, self._world.patience_s)
        if answer.error:
            return answer
        body = {"input_file_id": json.loads(answer.body)["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        return await self._world.once("/v1/batches", body)

    async def _read(self, said: dict[str, Any], entries: list[Entry], requests: list[Request]) -> None:
        """Each line once, in the file of answers or in that of errors."""
        world = self._world
        for name in ("output_file_id", "error_file_id"):
            for line in await self._lines(said.get(name)):
                number = int(line["custom_id"])
                response, error = line.get("response") or {}, line.get("error")
                if error or response.get("status_code") != 200:
                    text = json.dumps(error or response.get("body"))
                    world.ledger.error(entries[number], world.clock(), response.get("status_code", 0), text)
                else:
                    seen = of_whole(response["body"])
                    world.ledger.answer(entries[number], world.clock(), world.expected[requests[number].key], seen)
        for entry in entries:
            if not entry.end:
                world.ledger.lose(entry, world.clock(), f"the batch {said['id']} is {said['status']} without this line")

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        deadline = self._world.clock() + self._world.patience_s
        while file_id and self._world.clock() < deadline:
            answer = await self._world.once(f"/v1/files/{file_id}/content")
            if not answer.error:
                return [json.loads(line) for line in answer.body.splitlines() if line.strip()]
            await asyncio.sleep(POLL_S)
        return []
