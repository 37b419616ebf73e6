"""/v1/files: forms however they are written, lists in pages, contents in pieces, owners, bounds."""

import asyncio
import contextlib

import fake_client as http
import pytest
from fake_http import settle
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.api.bodies.multipart import boundary_of, parse_form
from quire.frontend.http.protocol.cors import Cors
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.http.store import bounds
from quire.frontend.http.store.storage import Storage

BOUNDARY = "----b"


def part(name, content: bytes, filename=None) -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"' + (f'; filename="{filename}"' if filename is not None else "")
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"


def form(content: bytes = b"{}\n", filename="in.jsonl", **fields) -> bytes:
    parts = [part(name, value.encode()) for name, value in {"purpose": "batch", **fields}.items() if value is not None]
    return b"".join([*parts, part("file", content, filename)]) + f"--{BOUNDARY}--\r\n".encode()


FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@contextlib.asynccontextmanager
async def kept(folder, **options):
    """An Api with a store of its own."""
    storage = Storage(str(folder), **options)
    try:
        yield http.Api(storage=storage, api_keys=["k", "other"])
    finally:
        await storage.close()


def key(name="k", **more):
    return {"Authorization": f"Bearer {name}", **more}


async def upload(api, content: bytes = b"{}\n", name="k", **fields):
    return await api.json("POST", "/v1/files", form(content, **fields), key(name, **FORM))


# -------------------------------------------------------------------------------------------------------------- forms
@settings(max_examples=100, deadline=None)
@given(
    parts=st.dictionaries(
        st.text("abc[]", min_size=1, max_size=8),
        st.tuples(
            st.binary(max_size=200) | st.lists(st.sampled_from([b"\r\n", b"--", b"----b", b"x"])).map(b"".join), st.booleans()
        ),
        max_size=5,
    ),
    after=st.binary(max_size=10),
)
def test_a_form_is_what_was_put_into_it(parts, after):
    mark = f"\r\n--{BOUNDARY}".encode()
    parts = {name: (content, is_file) for name, (content, is_file) in parts.items() if mark not in b"\r\n" + content + b"\r\n"}
    body = bytearray(b"".join(part(n, c, "f" if is_file else None) for n, (c, is_file) in parts.items()))
    body += f"--{BOUNDARY}--".encode() + after
    texts = {name: content for name, (content, is_file) in parts.items() if not is_file}
    try:
        expected = {name: content.decode() for name, content in texts.items()}
    except UnicodeDecodeError:
        with pytest.raises(ApiError):
            parse_form(body, BOUNDARY.encode())
        return
    found = parse_form(body, BOUNDARY.encode())
    assert found.fields == expected
    assert {n: bytes(body[f.begin : f.end]) for n, f in found.files.items()} == {n: c for n, (c, f) in parts.items() if f}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_broken_form_is_a_400(data):
    whole = form(b"some content")
    cut = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=30) | st.sampled_from([b"\r\n", b"--", b"\r\n----b"]))
    body = bytearray(whole[:cut] + junk + data.draw(st.sampled_from([b"", whole[cut:]])))
    with contextlib.suppress(ApiError):
        parse_form(body, BOUNDARY.encode())


def test_a_boundary_across_the_pieces_of_a_search():
    for size in range((1 << 20) - 60, (1 << 20) + 3):
        body = bytearray(form(bytes(size)))
        file = parse_form(body, BOUNDARY.encode()).files["file"]
        assert file.end - file.begin == size


def test_boundaries():
    assert boundary_of(b"multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of(b'Multipart/Form-Data; charset=utf-8; Boundary="a b"; x=y') == b"a b"
    for bad in (b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; xboundary=a", b""):
        with pytest.raises(ApiError, match="boundary"):
            boundary_of(bad)


def test_parameters_of_a_part_as_clients_write_them():
    for head in (
        "form-data; name=file; filename=a.jsonl",
        'form-data; filename="a.jsonl"; name="file"',
        "Form-Data; name=\"file\"; filename*=utf-8''a%2Ejsonl",
        'form-data; name="file"; filename="x"; filename*=utf-8\'en\'a.jsonl',
    ):
        body = bytearray(f"--{BOUNDARY}\r\ncontent-disposition: {head}\r\nX: y\r\n\r\nhi\r\n--{BOUNDARY}--".encode())
        found = parse_form(body, BOUNDARY.encode()).files["file"]
        assert (found.name, bytes(body[found.begin : found.end])) == ("a.jsonl", b"hi")


def test_names_of_files_are_no_paths():
    for given_name, shown in [
        ("../../etc/passwd", "passwd"),
        ("a\\\\b.txt", "b.txt"),
        ("", "upload"),
        ('q\\"q', 'q"q'),
        ("/", "upload"),
    ]:
        assert parse_form(bytearray(form(filename=given_name)), BOUNDARY.encode()).files["file"].name == shown


# ------------------------------------------------------------------------------------------------------------- routes
def test_a_file_from_upload_to_deletion(tmp_path):
    content = bytes(range(256)) * 4000  # several pieces

    async def main():
        async with kept(tmp_path) as api:
            status, made = await upload(
                api, content, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            )
            assert status == 200 and made["object"] == "file" and made["bytes"] == len(content)
            assert made["expires_at"] == made["created_at"] + 3600 and made["filename"] == "in.jsonl"
            path = f"/v1/files/{made['id']}"
            assert await api.json("GET", path, headers=key()) == (200, made)
            answer = await api.ask("GET", path + "/content", headers=key())
            assert answer.body == content and answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-disposition"] == "attachment"
            head = await api.ask("HEAD", path + "/content", headers=key())
            assert head.headers["content-length"] == str(len(content)) and head.body == b""
            assert await api.json("DELETE", path, headers=key()) == (200, {"id": made["id"], "object": "file", "deleted": True})
            for method, rest in [("GET", ""), ("GET", "/content"), ("DELETE", "")]:
                assert (await api.ask(method, path + rest, headers=key())).status == 404
            assert list((tmp_path / "contents").iterdir()) == []

    asyncio.run(main())


def test_a_client_that_does_not_read_holds_one_piece(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            _, made = await upload(api, bytes(3 << 20))
            wire = api.wire()
            wire.feed(api.encode("GET", f"/v1/files/{made['id']}/content", headers=key()))
            wire.connection.pause_writing()  # it is full from the first byte on
            while wire.transport.num_writes < 2:
                await asyncio.sleep(0)
            await settle()
            assert len(wire.transport.sent) < 1 << 20
            wire.connection.resume_writing()
            await asyncio.wait([wire.connection._task])
            (answer,) = wire.answers()
            assert answer.complete and len(answer.body) == 3 << 20

    asyncio.run(main())


def test_lists_come_in_pages_and_are_the_keys_own(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            ids = [(await upload(api))[1]["id"] for _ in range(5)]
            await upload(api, name="other")

            async def page(query):
                _, found = await api.json("GET", f"/v1/files{query}", headers=key())
                return [file["id"] for file in found["data"]], found["has_more"], found["first_id"], found["last_id"]

            assert await page("") == (ids[::-1], False, ids[4], ids[0])
            assert await page("?limit=2&order=asc") == (ids[:2], True, ids[0], ids[1])
            assert await page(f"?limit=3&order=asc&after={ids[1]}") == (ids[2:], False, ids[2], ids[4])
            assert await page("?purpose=batch_output") == ([], False, None, None)
            for query in ("limit=0", "limit=x", "limit=10001", "order=up", "after=file-1"):
                field = query.partition("=")[0]
                status, error = await api.json("GET", f"/v1/files?{query}", headers=key())
                assert status == 400 and error["error"]["param"] == field

    asyncio.run(main())


def test_another_keys_file_is_not_there(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            _, made = await upload(api)
            for method, rest in [("GET", ""), ("GET", "/content"), ("DELETE", "")]:
                assert (await api.ask(method, f"/v1/files/{made['id']}{rest}", headers=key("other"))).status == 404
            assert (await api.ask("GET", f"/v1/files/{made['id']}", headers=key())).status == 200
            stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
            assert b"Bearer" not in stored and b"other" not in stored

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": None}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"filename": None}, "file"),
        ({"content": b""}, "file"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after"),
        ({"expires_after": "5"}, "expires_after"),
        ({"x": "y" * 5000}, "x"),
    ],
)
def test_what_cannot_be_right_names_its_field(tmp_path, fields, param):
    async def main():
        async with kept(tmp_path) as api:
            status, error = await upload(api, **fields)
            assert (status, error["error"]["param"]) == (400, param), error

    asyncio.run(main())


def test_what_no_form_is_and_where_none_is_taken(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            assert (await api.ask("POST", "/v1/files", b"{}", key())).status == 415
            assert (await api.ask("POST", "/v1/files", b"junk", key(**FORM))).status == 400
            assert (await api.ask("POST", "/v1/completions", form(), key(**FORM))).status == 415
            assert (await api.ask("PUT", "/v1/files", form(), key(**FORM))).headers["allow"] == "POST, GET, HEAD"
            assert (await api.ask("DELETE", "/v1/models/x", headers=key())).headers["allow"] == "GET, HEAD"
            for path in (
                "/v1/files/",
                "/v1/files/../x",
                "/v1/files/%2e%2e",
                "/v1/files/file-1/content/x",
                "/v1/files/file-1/x",
            ):
                assert (await api.ask("GET", path, headers=key())).status == 404
            assert (await api.ask("POST", "/v1/files", form(), FORM)).status == 401

    asyncio.run(main())


def test_forms_may_be_larger_than_other_bodies(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            status, made = await upload(api, bytes(9 << 20))
            assert status == 200 and made["bytes"] == 9 << 20
            wire = api.wire()
            head = api.encode("POST", "/v1/files", b"", key(**FORM)).replace(
                b"Length: 0", b"Length: %d" % (bounds.MAX_FORM_BYTES + 1)
            )
            (answer,) = await wire.talk(head)
            assert answer.status == 413

    asyncio.run(main())


def test_a_full_store_says_so(tmp_path):
    async def main():
        async with kept(tmp_path, max_bytes=1 << 20) as api:
            _, first = await upload(api, bytes(700_000))
            status, error = await upload(api, bytes(700_000))
            assert status == 400 and error["error"]["code"] == "storage_full" and "delete" in error["error"]["message"]
            assert len(list((tmp_path / "contents").iterdir())) == 1
            await api.ask("DELETE", f"/v1/files/{first['id']}", headers=key())
            assert (await upload(api, bytes(700_000)))[0] == 200

    asyncio.run(main())


def test_a_page_of_a_foreign_origin_cannot_upload(tmp_path):
    async def main():
        storage = Storage(str(tmp_path))
        api = http.Api(storage=storage, cors=Cors(["https://ours.example"]))
        for origin, status in [("https://theirs.example", 403), ("https://ours.example", 200)]:
            assert (await api.ask("POST", "/v1/files", form(), {**FORM, "Origin": origin})).status == status
        await storage.close()

    asyncio.run(main())


def test_few_bodies_of_forms_are_in_memory_at_once(tmp_path):
    async def main():
        async with kept(tmp_path) as api:
            with contextlib.ExitStack() as others:
                for _ in range(bounds.MAX_UPLOADS):
                    others.enter_context(api.app._services.storage.upload_slot())
                answer = await api.ask("POST", "/v1/files", form(), key(**FORM))
                assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert (await upload(api))[0] == 200

    asyncio.run(main())
