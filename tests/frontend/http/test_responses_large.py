"""Large responses and large inputs of /v1/responses: whole, equal however they are sent, and keeping nobody waiting."""

import asyncio
import contextlib
import json
import os

import fake_client as http
from loop_gap import MOST_S, LoopGap
from replayed import Replayed
from responses_cases import RESPONSES, events_of

from quire.frontend.http.api.responses.answer import ResponseObject
from quire.frontend.http.api.responses.records import keep_begun, touch

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}


@contextlib.asynccontextmanager
async def replaying(num_tokens):
    api = http.Api(Replayed(num_tokens))
    try:
        yield api
    finally:
        await api.services.storage.close()


async def ask(api, body, path=RESPONSES, method=None):
    """The answer, whose making kept the loop from nobody for long. A GET where there is no body."""
    wire = api.wire()
    method = method or ("GET" if body is None else "POST")
    data = api.encode(method, path, body)
    async with LoopGap() as gap:
        wire.feed(data)
        while wire.connection._task is not None:
            await asyncio.wait([wire.connection._task])
    (answer,) = wire.answers(method)
    assert answer.complete and gap.worst_s < MOST_S
    return answer


def test_many_log_probabilities():
    async def main():
        async with replaying(200) as api:
            body = {"input": "hi", "max_output_tokens": 200, **LOGPROBS}
            whole = json.loads((await ask(api, body)).body)
            rows = whole["output"][0]["content"][0]["logprobs"]
            assert len(rows) == 200 and len(rows[7]["top_logprobs"]) == 20
            events = events_of(await ask(api, {**body, "stream": True}))
            assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == rows
            _, kept = await api.json("GET", f"{RESPONSES}/{whole['id']}")
            assert kept == whole

    asyncio.run(main())


def test_a_long_text_and_what_goes_on_from_it():
    async def main():
        async with replaying(100_000) as api:
            whole = json.loads((await ask(api, {"input": "hi", "max_output_tokens": 100_000})).body)
            assert whole["usage"]["output_tokens"] == 100_000
            answer = await ask(
                api, {"input": "on", "previous_response_id": whole["id"], "max_output_tokens": 9, "stream": True}
            )
            assert events_of(answer)[-1]["response"]["usage"]["input_tokens"] > 100_000

    asyncio.run(main())


def test_many_items_and_what_goes_on_from_them():
    async def main():
        async with replaying(2) as api:
            items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 5000
            first = json.loads((await ask(api, {"input": items, "max_output_tokens": 2})).body)
            goes_on = {"previous_response_id": first["id"], "max_output_tokens": 2}
            assert (await ask(api, {"input": "x", **goes_on})).status == 200
            more = await ask(api, {"input": items[:7000], **goes_on})  # more than a conversation may hold
            assert more.status == 400 and json.loads(more.body)["error"]["param"] == "input"

    asyncio.run(main())


def test_a_long_record_is_read_in_pieces_and_watched_without_being_read():
    async def main():
        async with replaying(2) as api:
            api.client.tokenizer = http.make_tokenizer(None, "{{ messages | length }}")
            long = [{"role": "user", "content": "x" * 3_000_000}, {"role": "user", "content": "y"}]
            body = {"input": long, "instructions": "z" * 2_000_000, "max_output_tokens": 2}
            made = json.loads((await ask(api, body)).body)
            for rest, part in (("", made["instructions"]), ("/input_items", long[0]["content"])):
                answer = await ask(api, None, f"{RESPONSES}/{made['id']}{rest}")
                assert answer.status == 200 and part in answer.body.decode()
                head = await ask(api, None, f"{RESPONSES}/{made['id']}{rest}", "HEAD")
                assert head.headers["content-length"] == answer.headers["content-length"]

            storage = api.services.storage
            begun = ResponseObject(id="resp_1", created_at=1, model="m", background=True)
            await keep_begun(storage, "o", begun, [{"id": "a" * (4 << 20)}])

            def written(database):
                return os.stat(f"{database.path}-wal").st_size

            await storage.database(lambda db: db.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
            before = await storage.database(written)
            assert await touch(storage, "o", begun.id) and not await touch(storage, "another", begun.id)
            assert await storage.database(written) - before < 64 << 10
            await storage.delete("response", "o", begun.id)
            assert not await touch(storage, "o", begun.id)

    asyncio.run(main())
