"""The store: bounds, owners, leases, several processes at once, and one that is killed amid anything."""

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store import bounds
from quire.frontend.http.store.batch_queue import ACTIVE, LEASE_S, Answer, BatchQueue, Result, read_answers
from quire.frontend.http.store.contents import Contents, FilesFolder
from quire.frontend.http.store.database import Database, StoreFull
from quire.frontend.http.store.storage import Storage


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def database(tmp_path, clock):
    database = Database(tmp_path / "r.sqlite3", 1 << 20, clock)
    yield database
    database.close()


# ----------------------------------------------------------------------------------------------------------- records
def test_a_record_is_its_owners_and_nobody_elses(database):
    database.put("response", "a", "1", b"one")
    assert database.get("response", "a", "1") == b"one"
    assert database.get("response", "b", "1") is None and database.get("batch", "a", "1") is None
    assert database.page("response", "b", limit=10).bodies == [] and database.page("response", "b", limit=1, after="1") is None
    assert not database.delete("response", "b", "1")
    with pytest.raises(ValueError, match="another owner"):
        database.put("response", "b", "1", b"mine now")
    assert database.edit("response", "b", "1", lambda body: b"x") is None
    assert database.edit("response", "a", "1", lambda body: body + b"!") == b"one!"
    assert database.delete("response", "a", "1") and not database.delete("response", "a", "1")


@settings(max_examples=30, deadline=None)
@given(
    tags=st.lists(st.sampled_from("xy"), max_size=12),
    limit=st.integers(1, 5),
    descending=st.booleans(),
    tag=st.sampled_from([None, "x", "z"]),
)
def test_pages_are_the_whole_list(tmp_path_factory, tags, limit, descending, tag):
    database = Database(tmp_path_factory.mktemp("pages") / "r.sqlite3", 1 << 20)
    for i, each in enumerate(tags):
        database.put("batch", "a", str(i), b"%d" % i, tag=each)
        database.put("batch", "b", f"other {i}", b"not mine", tag=each)
    expected = [b"%d" % i for i, each in enumerate(tags) if tag in (None, each)]
    found, after, more = [], None, True
    while more:
        page = database.page("batch", "a", after=after, limit=limit, descending=descending, tag=tag)
        assert len(page.bodies) <= limit
        found, more = found + page.bodies, page.has_more
        after = page.bodies[-1].decode() if page.bodies else None
    assert found == (expected[::-1] if descending else expected)
    database.close()


def test_a_replaced_record_keeps_its_place(database):
    for i in range(3):
        database.put("response", "a", str(i), b"old")
    database.put("response", "a", "1", b"new")
    assert database.page("response", "a", limit=9, descending=False).bodies == [b"old", b"new", b"old"]


def test_records_expire(database, clock):
    database.put("response", "a", "1", b"one", expires_at=clock.now + 10)
    database.put("file", "a", "f", b"file", size=5, expires_at=clock.now + 10)
    database.put("batch", "a", "b", b"kept")
    assert database.purge() == []
    clock.now += 10
    assert database.get("response", "a", "1") is None and database.page("response", "a", limit=1).bodies == []
    assert database.purge() == ["f"]
    assert database.get("batch", "a", "b") == b"kept"


def test_a_lease_is_renewed_while_its_record_has_the_tag_and_goes_some_day(database, clock):
    database.put("response", "a", "1", b"one", tag="running")
    assert database.leased_until("1") == 0 and database.renew("response", "a", "1", "running", clock.now + 20)
    assert database.leased_until("1") == clock.now + 20
    assert not database.renew("response", "b", "1", "running", clock.now) and not database.renew(
        "batch", "a", "1", "running", 0
    )
    database.edit("response", "a", "1", lambda body: body + b"!")  # which leaves the tag
    assert database.renew("response", "a", "1", "running", clock.now + 30)
    database.edit("response", "a", "1", lambda body: body, tag="")
    assert not database.renew("response", "a", "1", "running", clock.now + 99)
    database.purge()
    assert database.leased_until("1") == clock.now + 30
    clock.now += 2 * bounds.DAY_S
    database.purge()
    assert database.leased_until("1") == 0


def test_too_many_bytes_are_refused_and_change_nothing(database):
    database.put("file", "a", "1", b"", size=600_000)
    with pytest.raises(StoreFull, match="1 MiB of files"):
        database.put("file", "b", "2", b"", size=600_000)
    with pytest.raises(StoreFull):
        database.put("upload", "b", "3", b"", size=600_000)
    assert database.get("file", "b", "2") is None
    database.delete("file", "a", "1")
    database.put("file", "b", "2", b"", size=600_000)


def test_too_many_records_are_refused(database):
    for i in range(bounds.KINDS["upload"].max_records):
        database.put("upload", "a", str(i), b"")
    with pytest.raises(StoreFull, match="256 uploads"):
        database.put("upload", "b", "one more", b"")


def test_responses_push_out_the_oldest_of_whoever_has_most(database):
    size = bounds.MAX_RESPONSES_BYTES // 9
    database.put("response", "modest", "m", b"m", size=size // 2)
    for i in range(12):
        database.put("response", "greedy", str(i), b"g", size=size)
    assert database.get("response", "modest", "m") == b"m"
    assert [database.get("response", "greedy", str(i)) is not None for i in range(12)] == [False] * 4 + [True] * 8
    with pytest.raises(StoreFull, match="too large"):
        database.put("response", "modest", "n", b"", size=2 * size)
    assert database.get("response", "modest", "m") == b"m"


def test_the_files_are_for_their_user_alone(tmp_path):
    folder = FilesFolder(tmp_path / "new" / "folder")
    database, contents = Database(folder.path / "r.sqlite3", 1 << 20), Contents(folder.path)
    database.put("file", "a", "1", b"")
    contents.write("1", [b"x"])
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert len(files) >= 4 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    database.close()
    folder.close()


def test_another_versions_database_is_refused(tmp_path):
    database = Database(tmp_path / "r.sqlite3", 1 << 20)
    database.connection.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ValueError, match="another version"):
        Database(tmp_path / "r.sqlite3", 1 << 20)


# ------------------------------------------------------------------------------------------------------------ folder
def test_a_folder_is_one_servers(tmp_path):
    first = FilesFolder(tmp_path)
    with pytest.raises(ValueError, match="in use by another server"):
        FilesFolder(tmp_path)
    first.close()
    FilesFolder(tmp_path).close()
    assert tmp_path.exists()


def test_a_private_folder_goes_with_its_server_also_when_that_is_killed():
    code = "from quire.frontend.http.store.contents import FilesFolder as F; f = F(None); print(f.path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        path = child.stdout.readline().decode().strip()
        FilesFolder(None).close()
        assert os.path.exists(path)  # its server lives
        child.kill()
        child.wait()
        mine = FilesFolder(None)
        assert not os.path.exists(path) and mine.path.exists()
        mine.close()
        assert not mine.path.exists()


# ------------------------------------------------------------------------------------------------------------ leases
def make_batch(database, id="b"):
    database.put("batch", "a", id, b"v", tag=ACTIVE)


def test_a_batch_has_one_holder_until_its_lease_runs_out(database, clock):
    queue = BatchQueue(database)
    make_batch(database)
    assert queue.take("one").id == "b" and queue.take("two") is None
    for _ in range(3):
        clock.now += LEASE_S - 1
        assert queue.save("b", "one", [Answer(1, True, b"1")], lambda body: body + b"+") is not None
        assert queue.take("two") is None
    clock.now += LEASE_S
    assert queue.take("two").body == b"v+++"
    assert queue.answered("b") == {1: True}


def test_who_was_away_too_long_adds_nothing(database, clock):
    queue = BatchQueue(database)
    make_batch(database)
    queue.take("one")
    clock.now += LEASE_S
    queue.take("two")
    assert queue.save("b", "one", [Answer(1, True, b"late")], bytes) is None
    assert not queue.finish("b", "one", [], bytes, clock.now + 1)
    assert queue.save("b", "two", [Answer(1, True, b"in time"), Answer(2, False, b"no")], bytes) == b"v"
    queue.save("b", "two", [Answer(1, False, b"again")], bytes)
    assert list(read_answers(database.path, "b", True)) == [b"in time\n"]
    assert list(read_answers(database.path, "b", False)) == [b"no\n"]


def test_leases_given_back_and_clocks_set_back(database, clock):
    queue = BatchQueue(database)
    make_batch(database)
    queue.take("one")
    queue.give_back("one")
    assert queue.take("two").id == "b"
    clock.now -= 3600
    assert queue.take("three").id == "b"


def test_batches_are_taken_in_their_order_and_not_when_done(database, clock):
    queue = BatchQueue(database)
    make_batch(database, "b1")
    make_batch(database, "b2")
    assert [queue.take("one").id, queue.take("one").id, queue.take("one")] == ["b1", "b2", None]
    database.put("upload", "a", "f", b"")
    assert queue.finish(
        "b1", "one", [Result("f", b"file", 7, clock.now + 99, "batch_output")], lambda body: b"end", clock.now + 50
    )
    clock.now += LEASE_S
    assert queue.take("two").id == "b2" and queue.take("two") is None
    assert database.get("batch", "a", "b1") == b"end" and database.get("file", "a", "f") == b"file"


def test_answers_count_as_bytes(database):
    queue = BatchQueue(database)
    make_batch(database)
    queue.take("one")
    queue.save("b", "one", [Answer(1, True, bytes(600_000))], bytes)
    with pytest.raises(StoreFull):
        queue.save("b", "one", [Answer(2, True, bytes(600_000))], bytes)
    assert queue.answered("b") == {1: True}
    database.put("upload", "a", "f", b"")
    queue.finish("b", "one", [], bytes, 2e9)
    database.put("file", "a", "g", b"", size=900_000)


# --------------------------------------------------------------------------------------------------------- processes
WRITER = """
import asyncio, sys, secrets
from quire.frontend.http.api.files import new_file, new_file_id
from quire.frontend.http.store.storage import Storage

async def main(folder, owner, count):
    storage = Storage(folder)
    for i in range(count):
        size = 1 + secrets.randbelow(300_000)
        await storage.upload(owner, new_file(storage, new_file_id(), "x", "batch", size), [bytes(size)])
        if i == 3:
            print("busy", flush=True)
        if i % 3 == 2:
            page = await storage.list("file", owner, limit=1)
            import json
            await storage.delete("file", owner, json.loads(page.bodies[0])["id"])
    await storage.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def write_files(folder, owner, count) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), owner, str(count)], stdout=subprocess.PIPE)


def test_several_processes_write_at_once(tmp_path):
    children = [write_files(tmp_path, f"owner {i}", 9) for i in range(3)]
    assert [child.communicate(timeout=200) and child.returncode for child in children] == [0, 0, 0]
    database, contents = Database(tmp_path / "records.sqlite3", 1 << 30), Contents(tmp_path)
    assert [len(database.page("file", f"owner {i}", limit=99).bodies) for i in range(3)] == [6, 6, 6]
    assert len(contents.ids()) == 18 and database.without_record(contents.ids()) == []
    database.close()


def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path):
    async def look() -> None:
        storage = Storage(str(tmp_path))
        page = await storage.list("file", "a", limit=10_000)
        sizes = await storage.database(
            lambda db: dict(db.connection.execute("SELECT id, size - length(body) FROM records WHERE kind = 'file'").fetchall())
        )
        assert len(sizes) == len(page.bodies)
        for id, size in sizes.items():
            fd = await storage.open_content(id)
            assert os.fstat(fd).st_size == size
            os.close(fd)
        uploads = await storage.database(
            lambda db: {id for (id,) in db.connection.execute("SELECT id FROM records WHERE kind = 'upload'")}
        )
        assert set(await storage.files(lambda contents: contents.ids())) <= set(sizes) | uploads
        await storage.close()

    for seed in range(4):
        with write_files(tmp_path, "a", 10_000) as child:
            assert child.stdout.readline() == b"busy\n"
            threading.Event().wait(random.Random(seed).random() / 20)
            child.send_signal(signal.SIGKILL)
        asyncio.run(look())


# ----------------------------------------------------------------------------------------------------------- storage
def test_storage_is_not_there_before_it_is_used(tmp_path):
    async def main():
        storage = Storage(str(tmp_path))
        assert list(tmp_path.iterdir()) == []
        await storage.put("response", "a", "1", b"{}")
        assert await storage.get("response", "a", "1") == b"{}" and await storage.get("response", "b", "1") is None
        assert (await storage.list("response", "a", limit=1)).bodies == [b"{}"]
        assert await storage.delete("response", "a", "1")
        await storage.close()

    asyncio.run(main())


def test_what_is_wrong_with_the_disk_is_a_503(tmp_path):
    async def main():
        (tmp_path / "records.sqlite3").write_bytes(b"this is no database at all, but something else" * 100)
        storage = Storage(str(tmp_path))
        with pytest.raises(ApiError) as error:
            await storage.get("response", "a", "1")
        assert error.value.status == 503 and str(tmp_path) not in error.value.message
        await storage.close()

    asyncio.run(main())


def test_garbage_of_a_killed_process_is_removed_at_the_next_start(tmp_path):
    async def main():
        storage = Storage(str(tmp_path))
        await storage.get("file", "a", "x")
        (tmp_path / "contents" / "garbage").write_bytes(b"x")
        await storage.close()
        again = Storage(str(tmp_path))
        await again.get("file", "a", "x")
        assert await again.files(lambda contents: contents.ids()) == []
        await again.close()

    asyncio.run(main())
