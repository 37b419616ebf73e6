"""A link between two GPUs: both ends in one memory in the interpreter and on one GPU; what it compiles to for a Hopper."""

import os
import subprocess
import sys

import pytest
import torch

LIMIT_NS = 5 * 10**9


def ends(device, num_slots=2, slot_bytes=4096, unit=1):
    """(sender, receiver, the counters that have arrived and that were taken)"""
    from quire.kernels.exchange.peer_link import Receiver, Sender

    counters = torch.zeros(2, 64, dtype=torch.int32, device=device)
    slots = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8, device=device)
    arrived, taken = counters[0, :1], counters[1, :1]
    sender = Sender(taken, arrived.data_ptr(), slots.data_ptr(), num_slots, slot_bytes, unit, LIMIT_NS)
    return sender, Receiver(arrived, taken.data_ptr(), slots, LIMIT_NS), arrived, taken


def message(turn, shape, dtype, device):
    g = torch.Generator().manual_seed(turn)
    return torch.randint(-1000, 1000, shape, generator=g).to(device, dtype)


SHAPES = [((3, 64), torch.float32), ((1, 2), torch.bfloat16), ((7,), torch.int32), ((2, 512), torch.float16)]


def pass_on(device, turns, first=0):
    sender, receiver, arrived, taken = ends(device)
    arrived.fill_(first)
    taken.fill_(first)
    from quire.kernels.exchange.peer_link import receive, send

    for turn in range(first, first + turns):
        shape, dtype = SHAPES[turn % len(SHAPES)]
        x = message(turn, shape, dtype, device)
        send(x, turn, sender)
        out = torch.zeros_like(x)
        receive(out, turn, receiver)
        assert torch.equal(out, x)
    return arrived.item(), taken.item()


@pytest.mark.interpret
def test_what_is_sent_is_received_and_counted():
    assert pass_on("cpu", 9) == (9, 9)


@pytest.mark.interpret
def test_slots_are_taken_in_turn():
    from quire.kernels.exchange.peer_link import receive, send

    sender, receiver, arrived, taken = ends("cpu")
    xs = [message(turn, (4, 8), torch.float32, "cpu") for turn in range(3)]
    send(xs[0], 0, sender)
    send(xs[1], 1, sender)
    assert (arrived.item(), taken.item()) == (2, 0)
    out = torch.zeros(4, 8)
    receive(out, 0, receiver)
    send(xs[2], 2, sender)  # where the first has been
    for turn in (1, 2):
        receive(out, turn, receiver)
        assert torch.equal(out, xs[turn])


@pytest.mark.interpret
def test_counters_wrap_around():
    assert pass_on("cpu", 4, first=0) == (4, 4)
    from quire.kernels.exchange.peer_link import receive, send

    sender, receiver, arrived, taken = ends("cpu")
    turn = 2**31 - 2
    arrived.fill_(turn)
    taken.fill_(turn)
    for now in range(turn, turn + 4):
        x = message(now, (5,), torch.int32, "cpu")
        send(x, now, sender)
        out = torch.zeros_like(x)
        receive(out, now, receiver)
        assert torch.equal(out, x)
    assert arrived.item() == taken.item() == 2 - 2**31


def test_what_fits_no_slot_is_refused():
    pytest.importorskip("triton")
    from quire.kernels.exchange.peer_link import send

    sender, _, _, _ = ends("cpu")
    with pytest.raises(ValueError, match="does not fit"):
        send(torch.zeros(6), 0, sender._replace(unit=4))
    for x in (torch.zeros(1025), torch.zeros(3, dtype=torch.float16), torch.zeros(4, 4).t()):
        with pytest.raises(ValueError, match="does not fit a slot of 4096 bytes"):
            send(x, 0, sender)


PROGRAM = """
import hopper_offline
hopper_offline.compile_launches()
import torch
from quire.kernels.exchange import peer_link
from quire.kernels.exchange.peer_link import Receiver, Sender, receive, send
counter, slots = torch.zeros(1, dtype=torch.int32, device="meta"), torch.zeros(2, 4096, dtype=torch.uint8, device="meta")
address = 0x7F0000000000
for turn in (0, 1, 2, 3, 17):
    send(torch.zeros(4, 64, device="meta"), turn, Sender(counter, address, address + 4096, 2, 4096, 4, 5 * 10**9))
    receive(torch.zeros(4, 64, device="meta"), turn, Receiver(counter, address, slots, 5 * 10**9))
ptx = {kernel.metadata.name: kernel.asm["ptx"] for kernel in hopper_offline.COMPILED}
assert len({kernel.hash for kernel in hopper_offline.COMPILED}) == 3, "a turn is compiled for"
wait, say, copy = ptx["_wait_kernel"], ptx["_say_kernel"], ptx["_copy_kernel"]
assert any("acquire" in line and "sys" in line for line in wait.splitlines()), wait
assert any("release" in line and "sys" in line for line in say.splitlines()), say
assert "st.global.wt.v4.b32" in copy, copy
"""


@pytest.mark.slow  # seconds of compiling
def test_counters_are_read_and_written_for_other_gpus_to_see(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]


@pytest.mark.gpu
def test_ends_as_streams_of_one_gpu():
    """The receiver is launched first: it waits."""
    from quire.kernels.exchange.peer_link import receive, send

    assert pass_on("cuda", 8) == (8, 8)  # loads the kernels: to load one waits for those that run
    xs = [torch.randn(256, 1024, device="cuda") for _ in range(20)]
    outs = [torch.zeros_like(x) for x in xs]
    sender, receiver, _, _ = ends("cuda", slot_bytes=1 << 20)
    send(xs[0], 0, sender._replace(unit=4))  # and the copy by units
    receive(outs[0], 0, receiver)
    sender, receiver, _, _ = ends("cuda", slot_bytes=1 << 20)
    sender = sender._replace(unit=4)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for turn, (x, out) in enumerate(zip(xs, outs, strict=True)):
        with torch.cuda.stream(streams[0]):
            receive(out, turn, receiver)
        with torch.cuda.stream(streams[1]):
            send(x, turn, sender)
    torch.cuda.synchronize()
    assert all(torch.equal(x, out) for x, out in zip(xs, outs, strict=True))
