"""The store on a disk that is full, gone or wrong: what is told to whom, and what is left."""

import asyncio
import errno

import pytest

from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store.batch_queue import Result
from quire.frontend.http.store.storage import RECORDS, Storage, check_folder


def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing_there(tmp_path, caplog):
    def pieces():
        yield b"x" * 100
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main():
        storage = Storage(str(tmp_path))
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await storage.upload("a", Result("f1", b"{}", 100, 0.0, "batch"), pieces())
            assert (error.value.status, error.value.code) == (503, "storage_error")
        with pytest.raises(ApiError):  # alone: its record cannot be removed before there is room again
            await storage.files(lambda contents: contents.write("f2", pieces()))
        assert await storage.files(lambda contents: contents.ids()) == []
        await storage.close()

    asyncio.run(main())
    (told,) = caplog.records  # why, once, for the operator
    assert "No space left on device" in told.getMessage() and str(tmp_path) in told.getMessage()


def test_a_folder_that_is_gone_is_a_503(tmp_path, caplog):
    async def main():
        storage = Storage(str(tmp_path))
        await storage.get("file", "a", "x")
        (tmp_path / "contents").rmdir()
        for id in ("f1", "f2"):
            with pytest.raises(ApiError) as error:
                await storage.upload("a", Result(id, b"{}", 3, 0.0, "batch"), [b"abc"])
            assert error.value.status == 503
        with pytest.raises(FileNotFoundError):
            await storage.open_content("f1")
        await storage.close()

    asyncio.run(main())
    (told,) = caplog.records  # once, of whichever file
    assert "No such file" in told.getMessage()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda folder: (folder / RECORDS).write_bytes(b"no database" * 100), "records.sqlite3: file is not a database"),
        (lambda folder: (folder / RECORDS).mkdir(), "Is a directory"),
        (lambda folder: (folder / "contents").write_bytes(b""), "contents"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path, wrong, told):
    check_folder(tmp_path)
    for file in (tmp_path / "contents", tmp_path / RECORDS):
        file.rmdir() if file.is_dir() else file.unlink()
    wrong(tmp_path)
    with pytest.raises((OSError, ValueError), match=told):
        check_folder(tmp_path)
