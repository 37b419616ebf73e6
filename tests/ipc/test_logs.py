"""What a process writes when nobody takes it."""

import os

import pytest

from quire.ipc.process.logs import _dropping


def test_what_a_full_disk_is_given_is_dropped():
    fd = os.open("/dev/full", os.O_WRONLY)
    stream = _dropping(fd, None)
    print("Quire serves", file=stream, flush=True)
    stream.close()
    os.close(fd)


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_pipe_that_takes_no_more_holds_nobody_up(has_reader):
    reader, writer = os.pipe()
    if has_reader:
        os.set_blocking(writer, False)  # as another program that shares it may have done
    else:
        os.close(reader)
    stream = _dropping(writer, None)
    for _ in range(100):
        print("x" * 4000, file=stream)
    stream.close()
    os.close(writer)
    if has_reader:
        assert os.read(reader, 10) == b"x" * 10
        os.close(reader)
