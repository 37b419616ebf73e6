"""The children: what they answer, what their cage refuses, and what becomes of one that dies."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

from quire.frontend.media.child_messages import Question
from quire.frontend.media.children import MediaChildren, MediaChildrenError, num_children

FILES = {
    "preprocessor_config.json": json.dumps(
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16,
            "size": {"shortest_edge": 1024, "longest_edge": 1 << 17},
        }
    ).encode()
}


def _png(width=64, height=48):
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 7, np.uint8)).save(file, "PNG")
    return file.getvalue()


async def _with_children(use, number=1):
    children = MediaChildren(FILES, {}, number)
    await children.start()
    try:
        return await use(children)
    finally:
        await children.close()


def test_images_are_answered_and_broken_ones_refused():
    async def use(children):
        good = await children.ask(Question(_png()), "")
        assert (good.error, good.size, good.num_tokens) == ("", [64, 48], 4)
        assert good.tensors[0].num_bytes == len(good.data[0])
        raw = await children.ask(Question(bytes([7]) * (64 * 48 * 3), [48, 64, 3]), "")
        assert raw.data == good.data
        assert "must be JPEG" in (await children.ask(Question(b"<svg/>"), "")).error

    asyncio.run(_with_children(use))


def test_one_that_is_killed_is_replaced():
    async def use(children):
        first = await children.ask(Question(_png()), "")
        os.kill(children._children[0]._child.pid, signal.SIGKILL)
        assert await children.ask(Question(_png()), "") == first

    asyncio.run(_with_children(use))


def test_files_that_make_no_processor_are_an_error():
    async def start():
        children = MediaChildren({"preprocessor_config.json": b'{"image_processor_type": "Nothing"}'}, {}, 1)
        with pytest.raises(MediaChildrenError, match="image processor cannot be used"):
            await children.start()
        await children.close()

    asyncio.run(start())


def test_how_many_there_are():
    assert [num_children(None, 1, cpus) for cpus in (1, 2, 8, 64)] == [1, 1, 4, 4]
    assert num_children(6, 4, 64) == 1 and num_children(8, 2, 64) == 4


REFUSED = """
    import ctypes, os, socket, subprocess, threading
    from quire.frontend.media.sandbox import enter
    a, b = socket.socketpair()
    enter()
    def refused(act):
        try:
            act()
        except PermissionError:
            return
        raise SystemExit(f"allowed: {act}")
    refused(lambda: socket.socket())
    refused(lambda: open("/tmp/quire-sandbox-test", "w"))
    refused(lambda: os.open("/dev/null", os.O_RDWR))
    refused(lambda: os.execv("/bin/true", ["true"]))
    refused(lambda: os.fork())
    refused(lambda: os.kill(os.getppid(), 0))
    refused(lambda: os.unlink("/tmp/quire-sandbox-test"))
    refused(lambda: subprocess.run(["/bin/true"]))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(0, 0, 0, 0) == -1 and ctypes.get_errno() == 1
    a.sendall(b"x"); assert b.recv(1) == b"x"
    assert open("/proc/self/status").read()
    thread = threading.Thread(target=lambda: refused(lambda: socket.socket()))
    thread.start(); thread.join()
    print("caged")
"""


def test_the_sandbox_refuses_what_an_image_has_no_use_for():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(REFUSED)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "caged\n", done.stderr + done.stdout
