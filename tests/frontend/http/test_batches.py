"""/v1/batches: from a file of requests to files of answers, by whoever runs it, however that ends."""

import asyncio

import fake_client as http
import pytest
from batch_api import CHAT, chat, kept
from fake_http import settle

from quire.frontend.http.store.batch_queue import LEASE_S


def end(stream) -> None:
    """What FakeClient says, now."""
    stream.num_cached_tokens = 0
    http.FakeClient.say_output(http.FakeClient(), stream)


# ------------------------------------------------------------------------------------------------------------- a batch
def test_a_batch_is_answered_in_the_order_of_its_lines(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.run()
            lines = [chat(f"r{i}", temperature=-1 if i == 2 else 0) for i in range(7)]
            made = await api.make(*lines[:3], b"  ", *lines[3:], metadata={"a": "b"})
            batch = await api.until(made, "completed", "failed")
            assert batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1} and batch["metadata"] == {"a": "b"}
            assert batch["errors"] is None and batch["object"] == "batch" and batch["endpoint"] == CHAT
            times = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
            assert times == sorted(times) and batch["expires_at"] == batch["created_at"] + 24 * 3600
            output, errors = await api.lines(batch["output_file_id"]), await api.lines(batch["error_file_id"])
            assert [line["custom_id"] for line in output] == ["r0", "r1", "r3", "r4", "r5", "r6"]
            first = output[0]
            assert first["error"] is None and first["response"]["status_code"] == 200
            assert first["response"]["body"]["choices"][0]["message"]["content"] == api.client.OUTPUT
            assert first["id"] == first["response"]["request_id"] and first["response"]["body"]["id"].endswith(first["id"])
            assert [(e["custom_id"], e["response"]["status_code"], e["error"]) for e in errors] == [("r2", 400, None)]
            assert errors[0]["response"]["body"]["error"]["param"] == "temperature"
            _, file = await api.json("GET", f"/v1/files/{batch['output_file_id']}")
            assert file["purpose"] == "batch_output" and file["filename"] == f"{made}_output.jsonl"

    asyncio.run(main())


def test_an_input_that_is_not_right_fails_and_none_of_it_runs(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.run()
            other = {**chat("x"), "url": "/v1/completions"}
            made = await api.make(chat("a"), b"{", chat("a"), other, b'{"custom_id": "c"}', chat("d", stream=True))
            batch = await api.until(made, "completed", "failed")
            assert batch["status"] == "failed" and batch["output_file_id"] is None
            assert [(e["line"], e["code"]) for e in batch["errors"]["data"]] == [
                (2, "invalid_json_line"),
                (3, "duplicate_custom_id"),
                (4, "mismatched_endpoint"),
                (5, "missing_required_parameter"),
                (6, "invalid_value"),
            ]
            assert api.client.streams == []
            for content, code in [
                (b"\n \r\n", "empty_file"),
                (b"\n" * 200_000, "too_many_lines"),
                (b"{}\n" * 60_000, "too_many_lines"),
            ]:
                batch = await api.until(await api.make(content), "completed", "failed")
                assert batch["errors"]["data"][0]["code"] == code

    asyncio.run(main())


def test_an_input_that_is_deleted_fails_its_batch(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            made = await api.make(chat("a"))
            await api.ask("DELETE", f"/v1/files/{(await api.get(made))['input_file_id']}")
            api.run()
            batch = await api.until(made, "failed")
            assert batch["errors"]["data"][0]["code"] == "input_file_gone"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"endpoint": None}, 400, "endpoint"),
        ({"completion_window": "1w"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": 5}, 400, "input_file_id"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
    ],
)
def test_what_cannot_be_right_names_its_field(tmp_path, fields, status, param):
    async def main():
        async with kept(tmp_path) as api:
            body = {"input_file_id": await api.upload(chat("a")), "endpoint": CHAT, "completion_window": "24h", **fields}
            found, error = await api.json("POST", "/v1/batches", {k: v for k, v in body.items() if v is not None})
            assert (found, error["error"]["param"]) == (status, param), error
            assert (await api.json("GET", "/v1/batches"))[1]["data"] == []

    asyncio.run(main())


def test_batches_are_listed_in_pages_and_strange_ones_are_not_found(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            ids = [await api.make(chat("a")) for _ in range(3)]
            _, page = await api.json("GET", "/v1/batches?limit=2")
            assert [batch["id"] for batch in page["data"]] == ids[:0:-1] and page["has_more"]
            _, oldest = await api.json("GET", "/v1/batches?limit=1&order=asc")
            assert [batch["id"] for batch in oldest["data"]] == ids[:1]
            _, page = await api.json("GET", f"/v1/batches?limit=2&after={page['last_id']}")
            assert [batch["id"] for batch in page["data"]] == ids[:1] and not page["has_more"]
            for method, path in [
                ("GET", "x"),
                ("POST", f"{ids[0]}/x"),
                ("POST", "x/cancel"),
                ("POST", f"batch_{'0' * 32}/cancel"),
            ]:
                assert (await api.ask(method, f"/v1/batches/{path}")).status == 404
            assert (await api.ask("GET", f"/v1/batches/{ids[0]}/cancel")).status == 405

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------ how it may end
def test_a_cancelled_batch_keeps_what_is_done(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.client.speak = None
            api.run()
            made = await api.make(*(chat(f"r{i}") for i in range(5)))
            await api.until_submitted(5)
            end(api.client.streams[0])
            await api.until_completed(made, 1)
            status, batch = await api.json("POST", f"/v1/batches/{made}/cancel")
            assert status == 200 and batch["status"] == "cancelling"
            batch = await api.until(made, "cancelled")
            assert batch["cancelled_at"] >= batch["cancelling_at"]
            assert len(await api.lines(batch["output_file_id"])) == 1 and batch["error_file_id"] is None
            assert all(stream.cancelled for stream in api.client.streams[1:])
            assert b'status="5xx"' not in (await api.ask("GET", "/metrics")).body  # nothing has failed
            assert (await api.ask("POST", f"/v1/batches/{made}/cancel")).status == 200
            done = await api.make(chat("a"))
            api.client.speak = end
            await api.until_submitted(6)
            end(api.client.streams[5])
            await api.until(done, "completed")
            assert (await api.ask("POST", f"/v1/batches/{done}/cancel")).status == 400

    asyncio.run(main())


def test_a_batch_that_nobody_runs_yet_is_cancelled_too(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            made = await api.make(chat("a"))
            await api.ask("POST", f"/v1/batches/{made}/cancel")
            api.run()
            assert (await api.until(made, "cancelled"))["output_file_id"] is None
            assert api.client.streams == []

    asyncio.run(main())


def test_an_expired_batch_says_so_of_each_line_that_is_left(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.client.speak = None
            api.run()
            made = await api.make(chat("a"), chat("b"), completion_window="1h")
            await api.until_submitted(2)
            end(api.client.streams[1])
            await api.until_completed(made, 1)
            api.clock.ahead = 3600.0
            api.storage.batch_made.set()  # the runner looks
            batch = await api.until(made, "expired")
            (left,) = await api.lines(batch["error_file_id"])
            assert (left["custom_id"], left["response"], left["error"]["code"]) == ("a", None, "batch_expired")
            assert [line["custom_id"] for line in await api.lines(batch["output_file_id"])] == ["b"]
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}

    asyncio.run(main())


def test_a_full_store_ends_a_batch_with_what_it_has(tmp_path):
    def fill(database):
        (used,) = database.connection.execute("SELECT sum(size) FROM records").fetchone()
        database.put("file", "", "big", b"", size=(1 << 20) - used - 100)

    async def main():
        async with kept(tmp_path, max_bytes=1 << 20) as api:
            api.client.speak = None
            api.run()
            made = await api.make(chat("a"), chat("b"))
            await api.until_submitted(2)
            end(api.client.streams[0])
            await api.until_completed(made, 1)
            await api.storage.database(fill)
            end(api.client.streams[1])
            batch = await api.until(made, "failed", "completed")
            assert batch["errors"]["data"][0]["code"] == "storage_full"
            assert [line["custom_id"] for line in await api.lines(batch["output_file_id"])] == ["a"]
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 0}

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------- who runs it
def test_a_successor_goes_on_and_answers_nothing_twice(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.client.speak = None
            first = api.run()
            made = await api.make(*(chat(f"r{i}") for i in range(6)))
            await api.until_submitted(6)
            for stream in api.client.streams[1:3]:
                end(stream)
            await api.until_completed(made, 2)
            await api.stop(first)  # in order: it gives its lease back
            api.client.speak = end
            api.run()
            batch = await api.until(made, "completed")
            assert [line["custom_id"] for line in await api.lines(batch["output_file_id"])] == [f"r{i}" for i in range(6)]
            assert len(api.client.streams) == 6 + 4 and batch["request_counts"]["completed"] == 6

    asyncio.run(main())


def test_one_who_stood_still_adds_nothing_to_what_another_has_taken(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            api.client.speak = None
            api.run()
            made = await api.make(chat("a"), chat("b"))
            await api.until_submitted(2)

            def take_late(queue):  # at once, in the queue's thread: what is under way renews no lease at the late hour
                api.clock.ahead = LEASE_S + 1
                return queue.take("another")

            record = await api.storage.queue(take_late)
            assert record is not None and record.id == made
            for stream in api.client.streams:
                end(stream)
            await api.client.until(lambda: all(stream.finished for stream in api.client.streams))
            await settle(200)
            assert await api.storage.queue(lambda queue: queue.answered(made)) == {}
            assert (await api.get(made))["status"] == "in_progress"

    asyncio.run(main())


def test_several_runners_share_many_batches(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            made = [await api.make(*(chat(f"{i} {j}") for j in range(5))) for i in range(9)]
            for _ in range(3):
                api.run()
            for i, id in enumerate(made):
                batch = await api.until(id, "completed")
                ids = [line["custom_id"] for line in await api.lines(batch["output_file_id"])]
                assert ids == [f"{i} {j}" for j in range(5)]
            assert len(api.client.streams) == 45

    asyncio.run(main())


def test_a_stop_is_heard_whenever_it_comes(tmp_path):
    """Also in the very turn in which there is work: asyncio.wait_for would lose it, in Python 3.11."""

    async def main():
        async with kept(tmp_path) as api:
            await api.storage.get("batch", "", "x")
            for turns in range(8):
                api.client.news.clear()
                runner = api.run()
                await api.client.news.wait()  # it looks, finds nothing
                await settle()  # and waits
                api.storage.batch_made.set()
                await settle(turns)
                async with asyncio.timeout(10):
                    await api.stop(runner)

    asyncio.run(main())
