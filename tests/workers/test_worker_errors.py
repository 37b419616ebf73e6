"""What a worker says of a kernel that cannot be compiled."""

import subprocess

import pytest

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from quire.ipc.messages.workers import WorkerFailed
from quire.kernels.tuning.current import TuningError, read_table
from quire.workers.start_failures import _reason
from quire.workers.worker import Worker


def compilation_error() -> CompilationError:
    """As Triton raises it for a mistake in a function that a kernel calls."""
    cause = AttributeError("module 'triton.language' has no attribute 'no_such_function'")
    try:
        try:
            raise cause
        except AttributeError as error:
            raise CompilationError("def f(x):\n    g(x)\n    ^", None, None) from error
    except CompilationError as error:
        return error


@pytest.mark.parametrize(
    "error,reason",
    [
        (compilation_error(), "AttributeError: module 'triton.language' has no attribute 'no_such_function'"),
        (CompilationError("x = y\n", None, "y is not defined"), "CompilationError: y is not defined"),
        (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (
            RuntimeError("ptxas failed\nfatal: no space left\nRepro command: ptxas -v x.ptx"),
            "RuntimeError: fatal: no space left",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_the_reason_is_the_innermost_cause_in_a_line(error, reason):
    said = _reason(error)
    assert said.startswith(reason) and "\n" not in said


class Link:
    def __init__(self):
        self.sent, self.closed = [], False

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.closed = True


def worker_that_fails(error: Exception) -> Worker:
    def start():
        raise error

    worker = Worker.__new__(Worker)
    worker.link, worker._start = Link(), start
    worker.config = type("Config", (), {"rank": 3})
    return worker


def test_a_kernel_that_cannot_be_compiled_is_told_and_logged(caplog):
    worker = worker_that_fails(compilation_error())
    worker.run()
    [message] = worker.link.sent
    assert isinstance(message, WorkerFailed) and message.rank == 3 and worker.link.closed
    assert "no_such_function" in message.message and "Traceback" in caplog.text


def test_a_tuning_table_that_is_none_is_told(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text("{}")
    with pytest.raises(TuningError) as failure:
        read_table(path)
    worker = worker_that_fails(failure.value)
    worker.run()
    [message] = worker.link.sent
    assert isinstance(message, WorkerFailed) and "gpu.json is not a tuning table" in message.message


@pytest.mark.parametrize(
    "error,said",
    [
        (RuntimeError("[enforce fail] err == 0. can't allocate memory: you tried to allocate 9 bytes."), "allocate 9 bytes"),
        (MemoryError(), "memory does not suffice"),
        (OSError(24, "Too many open files"), "Too many open files"),
    ],
)
def test_a_machine_that_is_too_small_is_told_in_a_line(error, said):
    worker = worker_that_fails(error)
    worker.run()
    [message] = worker.link.sent
    assert said in message.message and "\n" not in message.message


def test_other_errors_are_raised():
    with pytest.raises(subprocess.SubprocessError):
        worker_that_fails(subprocess.SubprocessError("x")).run()
