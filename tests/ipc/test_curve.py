"""Keys: files, the allow-list, and who gets in over tcp."""

import asyncio
import logging
import socket

import pytest
import zmq
from deadlines import DEADLINE_S
from ipc_cores import CoreThread

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.curve import (
    CoreKeys,
    FrontendKeys,
    load_allow_list,
    load_core_keys,
    load_keys,
    make_keys,
    parse_key,
    write_keys,
)
from quire.ipc.links.frontend_to_core import FrontendToCore, LinkDown


def test_key_file_is_private_and_reads_back(tmp_path):
    path, keys = tmp_path / "core.key", make_keys()
    write_keys(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_keys(path) == keys
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(FileExistsError):
        write_keys(path, make_keys())
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        load_keys(path)


@pytest.mark.parametrize("text", ["", "public x\nsecret y\n", "public {public}\n", "public {secret}\nsecret {secret}\n"])
def test_malformed_key_file_is_refused_without_telling_its_content(tmp_path, text):
    keys = make_keys()
    path = tmp_path / "bad.key"
    path.touch(mode=0o600)
    path.write_text(text.format(public=keys.public.decode(), secret=keys.secret.decode()))
    with pytest.raises(ValueError, match=r"bad\.key") as caught:
        load_keys(path)
    assert keys.secret.decode() not in str(caught.value)


def test_a_list_that_is_not_there_says_what_it_holds(tmp_path):
    with pytest.raises(ValueError, match="is not there: write the public keys"):
        load_allow_list(tmp_path / "frontends.allow")


def test_allow_list_has_comments_and_names(tmp_path):
    keys = [make_keys().public for _ in range(3)]
    path = tmp_path / "allowed"
    lines = ["# the frontends", "#", "", keys[0].decode(), f"  {keys[1].decode()}  host-b", keys[2].decode()]
    path.write_text("\n".join(lines))
    assert load_allow_list(path) == frozenset(keys)
    for bad in ("", "# nobody\n", "not-a-key\n"):
        path.write_text(bad)
        with pytest.raises(ValueError, match="allowed"):
            load_allow_list(path)
    path.write_text("\n".join([*lines, "#a comment that is none"]))
    with pytest.raises(ValueError, match="allowed, line 7: a key is 40 characters"):
        load_allow_list(path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=r"allowed cannot be read: it is no text$"):
        load_allow_list(path)


def test_keys_of_z85_only():
    for bad in ("", "x" * 39, "x" * 41, " " * 40, "\u00e9" * 40, '"' * 40, "#" * 40, "%nSc1" + "0" * 35):  # 2^32 and more in 5
        with pytest.raises(ValueError, match="z85"):
            parse_key(bad)


@pytest.fixture
def identities(tmp_path):
    """Keys of a core and two frontends, of which only the first is allowed."""
    core, friend, stranger = make_keys(), make_keys(), make_keys()
    write_keys(tmp_path / "core.key", core)
    (tmp_path / "allowed").write_text(friend.public.decode())
    return load_core_keys(tmp_path / "core.key", tmp_path / "allowed"), friend, stranger


def test_allowed_key_connects_over_tcp_and_others_do_not(identities, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    core_keys, friend, stranger = identities
    core = CoreThread(lambda *_: None, "tcp://127.0.0.1:*", keys=core_keys)
    public = core_keys.own.public

    async def main() -> None:
        link = await FrontendToCore.connect(
            core.address, on_message=print, keys=FrontendKeys(friend, public), timeout_s=DEADLINE_S
        )
        assert link.welcome.served_model_names == ["tiny"]
        with pytest.raises(LinkDown, match="does not admit"):
            await FrontendToCore.connect(
                core.address, on_message=print, keys=FrontendKeys(stranger, public), timeout_s=DEADLINE_S
            )
        for keys in (None, FrontendKeys(friend, stranger.public)):
            with pytest.raises(LinkDown):
                await FrontendToCore.connect(core.address, on_message=print, keys=keys, timeout_s=0.3)
        assert link.connected
        await link.close()

    try:
        asyncio.run(main())
        assert core.core.requests == []
    finally:
        core.stop()
    lines = {r.getMessage() for r in caplog.records if "allow-list" in r.getMessage()}
    named = f"a connection from 127.0.0.1 is refused: its key, {stranger.public.decode()}, is not in the allow-list"
    assert lines == {named}


def test_plain_socket_gets_no_word_from_a_core_with_keys(identities):
    core = CoreThread(lambda *_: None, "tcp://127.0.0.1:*", keys=identities[0])
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(core.address)
            plain.send(b"\x92\xa5hello\x01")
            assert plain.poll(200) == 0
    finally:
        core.stop()


def test_loopback_tcp_needs_no_keys():
    core = CoreThread(lambda *_: None, "tcp://127.0.0.1:*")

    async def main() -> None:
        link = await FrontendToCore.connect(core.address, on_message=print, timeout_s=DEADLINE_S)
        await link.close()

    try:
        asyncio.run(main())
    finally:
        core.stop()


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:*", "tcp://[::]:1", "tcp://eth0:1", "tcp://h:1"]
)
def test_tcp_beyond_this_machine_needs_keys(address):
    with pytest.raises(ValueError, match="--curve-secret-key-file"):
        CoreToFrontends(address, epoch=1)


@pytest.mark.parametrize(
    "address",
    ["", "/tmp/x", "ipc://x", "ipc://@abstract", "ipc:///" + "x" * 107, "tcp://127.0.0.1", "tcp://127.0.0.1:x", "udp://1:1"],
)
def test_malformed_address_is_refused(address):
    with pytest.raises(ValueError, match=r"address|path"):
        CoreToFrontends(address, epoch=1)


def test_address_that_cannot_be_bound_leaves_nothing_behind():
    keys = CoreKeys(make_keys(), frozenset([make_keys().public]))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for given in (None, keys):
            with pytest.raises(zmq.ZMQError, match="in use"):
                CoreToFrontends(f"tcp://127.0.0.1:{taken.getsockname()[1]}", epoch=1, keys=given)
