"""The store between API keys: bounds of one key beneath those of all, and whose batch is next."""

import pytest

from quire.frontend.http.store.batch_queue import ACTIVE, BatchQueue
from quire.frontend.http.store.bounds import KeyBounds
from quire.frontend.http.store.database import Database, StoreFull


def test_one_key_has_bounds_beneath_those_of_all(tmp_path):
    bounds = {"a": KeyBounds(3), "b": KeyBounds(3, 2000), "": None}
    database = Database(tmp_path / "r.sqlite3", 1 << 20, key_bounds=bounds.__getitem__)
    for i in range(3):
        database.put("file", "a", f"a{i}", b"x")
    with pytest.raises(StoreFull, match="this API key keeps 3 files at most"):
        database.put("file", "a", "a3", b"x")
    assert len(database.page("file", "a", limit=9).bodies) == 3
    database.put("batch", "a", "batch", b"x")
    for i in range(2):
        database.put("file", "b", f"b{i}", b"x", size=900)
    with pytest.raises(StoreFull, match="this API key keeps 0 MiB"):
        database.put("upload", "b", "b2", b"x", size=900)
    for i in range(10):
        database.put("file", "", str(i), b"x", size=90_000)
    assert database.delete("file", "a", "a0")
    database.put("file", "a", "a3", b"x")
    database.close()


def test_half_of_all_is_the_most_of_one_key(tmp_path):
    database = Database(tmp_path / "r.sqlite3", 10_000, key_bounds=lambda owner: KeyBounds())
    with pytest.raises(StoreFull, match="this API key"):
        database.put("file", "a", "1", b"", size=5001)
    database.put("file", "a", "1", b"", size=5000)
    database.put("file", "b", "2", b"", size=5000)
    database.close()


def test_the_next_batch_is_of_the_key_with_the_fewest_that_run(tmp_path):
    database = Database(tmp_path / "r.sqlite3", 1 << 20)
    queue = BatchQueue(database)
    for id, owner in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        database.put("batch", owner, id, b"x", tag=ACTIVE)
    taken = [queue.take("one").id for _ in range(4)]
    assert taken == ["a1", "b1", "c1", "a2"]
    assert queue.take("two", ["b"]).id == "a3" and queue.take("two", ["a", "b"]) is None
    assert [queue.take("two").id, queue.take("one").id, queue.take("one")] == ["b2", "a4", None]
    database.close()
