"""A peer for frontend.py: FastAPI on uvicorn, built like vLLM's server, with the same engine and the same client to it.

Bodies are pydantic models, checked by FastAPI; each chunk of a stream is a pydantic model written with model_dump_json and sent
by a StreamingResponse; uvloop and httptools underneath. Tokenizer, detokenizing and the ZeroMQ client are Quire's own
(AsyncClient), so the difference is a request's way in through HTTP and a token's way out. It serves the two generating routes
with the fields that the benchmark sends, and nothing more.

    python benchmarks/frontend_peer.py --engine ipc:///tmp/replay.sock --port 8001
"""

import argparse
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.stream import Stream
from quire.ipc.sampling import SamplingParams


class StreamOptions(BaseModel):
    include_usage: bool = False


class Sampling(BaseModel):
    model: str | None = None
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False


class Message(BaseModel):
    role: str
    content: str


class ChatBody(Sampling):
    messages: list[Message]


class CompletionBody(Sampling):
    prompt: str | list[int]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DeltaMessage(BaseModel):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: DeltaMessage
    logprobs: Any = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatChoice(BaseModel):
    index: int
    message: DeltaMessage
    logprobs: Any = None
    finish_reason: str | None = None


class Chat(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


def make_app(client: AsyncClient) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await client.connect()
        yield
        await client.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        ids = await client.tokenize(body.prompt) if isinstance(body.prompt, str) else body.prompt
        stream = client.submit(ids, _params(body))
        if body.stream:
            return StreamingResponse(_chunks(body, stream, chat=False), media_type="text/event-stream")
        deltas = await stream.collect()
        choices = [CompletionChoice(index=d.index, text=d.text, finish_reason=d.finish_reason) for d in deltas]
        answer = Completion(**_head("cmpl"), choices=choices, usage=_usage(stream))
        return JSONResponse(answer.model_dump())

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        text = client.tokenizer.render_chat([message.model_dump() for message in body.messages])
        stream = client.submit(await client.tokenize(text, add_special_tokens=False), _params(body))
        if body.stream:
            return StreamingResponse(_chunks(body, stream, chat=True), media_type="text/event-stream")
        choices = [
            ChatChoice(index=d.index, message=DeltaMessage(role="assistant", content=d.text), finish_reason=d.finish_reason)
            for d in await stream.collect()
        ]
        return JSONResponse(Chat(**_head("chatcmpl"), choices=choices, usage=_usage(stream)).model_dump())

    return app


async def _chunks(body: Sampling, stream: Stream, chat: bool) -> AsyncIterator[str]:
    head = _head("chatcmpl" if chat else "cmpl")
    if chat:
        for index in range(body.n):
            choice = ChatChunkChoice(index=index, delta=DeltaMessage(role="assistant", content=""))
            yield _event(ChatChunk(**head, choices=[choice]))
    async for deltas in stream:
        for d in deltas:
            if chat:
                delta = DeltaMessage(content=d.text)
                choice = ChatChunkChoice(index=d.index, delta=delta, finish_reason=d.finish_reason)
                yield _event(ChatChunk(**head, choices=[choice]))
            else:
                text = CompletionChoice(index=d.index, text=d.text, finish_reason=d.finish_reason)
                yield _event(Completion(**head, choices=[text]))
    if body.stream_options is not None and body.stream_options.include_usage:
        kind: Any = ChatChunk if chat else Completion
        yield _event(kind(**head, choices=[], usage=_usage(stream)))
    yield "data: [DONE]\n\n"


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def _head(prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": "replay"}


def _params(body: Sampling) -> SamplingParams:
    return SamplingParams(
        n=body.n,
        max_tokens=body.max_tokens,
        temperature=body.temperature if body.temperature is not None else 1.0,
        top_p=body.top_p if body.top_p is not None else 1.0,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
    )


def _usage(stream: Stream) -> Usage:
    prompt, output = stream.num_prompt_tokens, stream.num_output_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = make_app(AsyncClient(args.engine))
    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
