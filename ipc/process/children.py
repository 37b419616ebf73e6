"""Child processes: start one, give it its configuration, and let neither side outlive the other unnoticed.

A child is `python -P -m module --control-fd N --parent-pid P`. Its configuration comes as JSON over the control socket; the
parent keeps the other end open as long as it lives. A child ends with its parent in two ways: by the parent-death signal, which
the kernel sends when the *thread* that started the child ends (so `spawn` starts every child from a thread that never ends);
and by the control socket's end of file, which a thread of the child watches, and which works even if the signal was missed. A
child shows by heartbeats that its loop is alive: a counter (an eventfd) that never fills, read by the process that replaces
hung children.
"""

import argparse
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from quire.ipc.links.paths import remove_private_directories

CORE_MODULE, WORKER_MODULE = "quire.enginecore", "quire.workers"

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_FDS = 64
_CONFIG_TIMEOUT_S = 60.0
_ORPHAN_EXIT_CODE = 70
FROM_OUTSIDE = "from_outside"  # in a child's message on an error of its start: a signal is the cause
# Signals that come from outside: an operator's, or for lack of memory. A mistake of the process itself ends in another way.
_SIGNALS_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
KILL_WAIT_S = 5.0  # until a killed process is gone; one in uninterruptible sleep may never be

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)

_control: list[socket.socket] = []  # a child's end of its control socket
_own_fds: dict[int, int] = {}  # in a child: its parent's numbers -> its own
_heartbeat_fd: list[int] = []  # in a child: its counter of heartbeats
_on_message: list[Callable[[dict[str, str], list[int]], None]] = []  # in a child: what takes its parent's messages


class Child:
    """A running child. Keep this object: when it is closed or dropped, the child takes that as its parent's death."""

    def __init__(self, proc: subprocess.Popen[bytes], control: socket.socket, heartbeat_fd: int) -> None:
        self.proc = proc
        self.pid = proc.pid
        self._control = control
        self._heartbeat_fd = heartbeat_fd
        self._pidfd = os.pidfd_open(proc.pid)

    def fileno(self) -> int:
        """A pidfd: readable once the child has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit code (negative: the signal that killed it), or None while it runs."""
        return self.proc.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; the exit code, or None after timeout_s."""
        if self.proc.returncode is None and self._pidfd >= 0:  # Popen.wait would poll repeatedly
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(max(0.0, timeout_s) * 1000)
            timeout_s = 0.0
        with suppress(subprocess.TimeoutExpired):
            return self.proc.wait(timeout_s)
        return None

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal (SIGSTOP), or by a debugger."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def configure(self, config: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send the child the configuration that it waits for, once, and descriptors; its `own_fds` returns their numbers."""
        with suppress(ConnectionError):  # it has ended already, which poll() and fileno() report
            _send_message(self._control, msgspec.json.encode(fds), fds)
            _send_message(self._control, msgspec.json.encode(config))

    def receive(self, timeout_s: float) -> dict[str, str] | None:
        """The child's next message by `tell_parent`; None if none comes within timeout_s, or if the child ends before."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return None
        try:
            body = _read_message(self._control)
            return None if body is None else msgspec.json.decode(body, type=dict[str, str])
        except (OSError, ValueError):
            return None  # it is ending, which poll() and fileno() report

    def control_fileno(self) -> int:
        """Readable once the child has sent a message, or has closed its end."""
        return self._control.fileno()

    def tell(self, message: dict[str, str], fds: Sequence[int] = ()) -> None:
        """Send the child a message, perhaps with descriptors; it arrives at the handler of `on_parent_message`."""
        with suppress(OSError):  # it has ended, which poll() and fileno() report
            _send_message(self._control, msgspec.json.encode(message), fds)

    def heartbeats(self) -> int:
        """How often the child has called `heartbeat` since the last call of this method."""
        with suppress(BlockingIOError):
            return os.eventfd_read(self._heartbeat_fd)
        return 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended. A stopped child goes on to act on SIGTERM, as with systemd."""
        self.proc.send_signal(number)
        if number == signal.SIGTERM:
            self.proc.send_signal(signal.SIGCONT)

    def terminate(self, grace_s: float) -> int | None:
        """SIGTERM, after grace_s SIGKILL; closes the parent's descriptors and returns the exit code. May be called again.

        None if it is not gone KILL_WAIT_S after SIGKILL: then it hangs in the kernel, and nothing can end it.
        """
        if self.proc.poll() is None:
            self.send_signal(signal.SIGTERM)
            if self.wait(grace_s) is None:
                self.proc.kill()
                self.wait(KILL_WAIT_S)
        self.close()
        return self.proc.returncode

    def close(self) -> None:
        """Close the parent's descriptors. A child that still runs takes that as its parent's death."""
        self._control.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            os.close(self._heartbeat_fd)
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"Child(pid={self.pid}, returncode={self.proc.returncode})"


def wait_for_all(children: Sequence[Child], timeout_s: float) -> list[Child]:
    """Wait for the end of several children, timeout_s for all of them together; returns those that still run."""
    deadline = time.monotonic() + timeout_s
    return [child for child in children if child.wait(deadline - time.monotonic()) is None]


def how_it_ended(code: int | None) -> str:
    """The result of `Child.poll` or `Child.terminate` in words."""
    if code is None:
        return "it does not end even when it is killed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def was_killed(code: int | None) -> bool:
    """Whether a signal from outside ended the process, by the result of `Child.poll`."""
    return code is not None and -code in _SIGNALS_FROM_OUTSIDE


def spawn(module: str, config: msgspec.Struct, pass_fds: Sequence[int] = (), *, arguments: Sequence[str] = ()) -> Child:
    """Start `python -P -m module` with this configuration; pass_fds keep their numbers. It inherits environment and output.

    May be called from any thread: threads but the main one delegate the start to a thread that lives as long as the process.
    """
    child = prespawn(module, pass_fds, arguments=arguments)
    child.configure(config)
    return child


def prespawn(
    module: str,
    pass_fds: Sequence[int] = (),
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Child:
    """The first half of `spawn`: a child that loads its modules and waits for `Child.configure`; it ends if closed before.

    environment: the child's; None: this process's."""
    if threading.current_thread() is threading.main_thread():
        return _start(module, pass_fds, arguments, environment)
    return _spawner.call(lambda: _start(module, pass_fds, arguments, environment))


def _start(module: str, pass_fds: Sequence[int], arguments: Sequence[str], environment: Mapping[str, str] | None) -> Child:
    mine, theirs = socket.socketpair()
    with theirs, ExitStack() as on_failure:
        on_failure.enter_context(mine)
        heartbeats = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        on_failure.callback(os.close, heartbeats)
        command = [sys.executable, "-P", "-m", module, "--control-fd", str(theirs.fileno()), "--heartbeat-fd", str(heartbeats)]
        command += ["--parent-pid", str(os.getpid()), *arguments]
        proc = subprocess.Popen(
            command,
            pass_fds=[*pass_fds, theirs.fileno(), heartbeats],
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,  # a terminal's Ctrl-C must reach the launcher only, which ends its children in order
        )
        child = Child(proc, mine, heartbeats)
        on_failure.pop_all()
    mine.settimeout(_CONFIG_TIMEOUT_S)
    return child


# A message on the control socket is its length in 8 bytes, little-endian, and then the JSON.
def _send_message(control: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    header = len(body).to_bytes(8, "little")
    sent = socket.send_fds(control, [header], fds) if fds else 0
    control.sendall(header[sent:] + body)


def _read_message(control: socket.socket, header: bytes = b"") -> bytes | None:
    """The next message, or None if the other end has gone. header: bytes of it that have been read already."""
    header += _read_exactly(control, 8 - len(header))
    size = int.from_bytes(header, "little")
    if size > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes cannot be right")
    body = _read_exactly(control, size)
    return body if len(header) == 8 and len(body) == size else None


def _read_exactly(control: socket.socket, size: int) -> bytes:
    parts, missing = [], size
    while missing and (part := control.recv(min(missing, 1 << 20))):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


class _Spawner:
    """A daemon thread that starts children for threads that may end before the children."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[Callable[[], Child], Future[Child]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, start: Callable[[], Child]) -> Child:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-spawner", daemon=True)
                self._thread.start()
        done: Future[Child] = Future()
        self._requests.put((start, done))
        return done.result()

    def _run(self) -> None:
        while True:
            start, done = self._requests.get()
            try:
                done.set_result(start())
            except Exception as error:  # raised in the caller by done.result()
                done.set_exception(error)
            del start, done  # otherwise they, and an error's frames, would live until the next start


_spawner = _Spawner()


# ------------------------------------------------------------------------------------------------- in the child
def child_main_config(
    config_type: type[ConfigT], *, death_signal: signal.Signals = signal.SIGKILL, grace_s: float = 5.0
) -> ConfigT:
    """First call of a child's main: tie its life to the parent's and read the configuration.

    death_signal comes when the parent dies: SIGKILL for a process that leaves nothing behind, SIGTERM for one with a handler
    that cleans up. In any case the child exits grace_s after its parent, and at once if the parent is gone already.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--heartbeat-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args, _ = parser.parse_known_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it sets its own handler; Python's would print a traceback
    die_with_parent(args.parent_pid, death_signal)
    for fd in (args.control_fd, args.heartbeat_fd):
        os.set_inheritable(fd, False)
    _heartbeat_fd.append(args.heartbeat_fd)
    control = socket.socket(fileno=args.control_fd)
    header, fds, _, _ = socket.recv_fds(control, 8, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    numbers, body = _read_message(control, header), _read_message(control)
    if numbers is None or body is None:
        os._exit(_ORPHAN_EXIT_CODE)
    _own_fds.update(zip(msgspec.json.decode(numbers, type=list[int]), fds, strict=True))
    config = msgspec.json.decode(body, type=config_type)
    _control.append(control)
    threading.Thread(target=_watch_parent, args=(control, grace_s), name="parent-watch", daemon=True).start()
    return config


def own_fds(numbers: Sequence[int]) -> list[int]:
    """Translate the parent's numbers of descriptors that came with the configuration. If none came, they were inherited.

    Raises KeyError for a descriptor that did not come.
    """
    return [_own_fds[number] for number in numbers] if _own_fds else list(numbers)


def tell_parent(message: dict[str, str]) -> None:
    """Send the parent a message, e.g. that this child is ready, or why it cannot be; it arrives at `Child.receive`."""
    with suppress(OSError):
        _send_message(_control[0], msgspec.json.encode(message))


def on_parent_message(handler: Callable[[dict[str, str], list[int]], None]) -> None:
    """Let this handler take what the parent sends by `Child.tell`, with descriptors, which it owns. It runs in a thread of its
    own. Messages that came before are dropped."""
    _on_message[:] = [handler]


def heartbeat() -> None:
    """Show the parent that this child's loop is alive: it may count by `Child.heartbeats`."""
    with suppress(BlockingIOError):  # 2^64 heartbeats without a read
        os.eventfd_write(_heartbeat_fd[0], 1)


def die_with_parent(parent_pid: int, death_signal: signal.Signals) -> None:
    """Ask the kernel to send death_signal when the thread that started us ends; exit if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(_ORPHAN_EXIT_CODE)


def _take_message(control: socket.socket) -> bool:
    """Pass the parent's next message on; returns False at the end."""
    header, fds, _, _ = socket.recv_fds(control, 8, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not header or (body := _read_message(control, header)) is None:
        return False
    message = msgspec.json.decode(body, type=dict[str, str])
    if _on_message:
        _on_message[0](message, fds)
    else:
        for fd in fds:
            os.close(fd)
    return True


def _watch_parent(control: socket.socket, grace_s: float) -> None:
    with suppress(ConnectionError, ValueError):
        while _take_message(control):
            pass
    handler = signal.getsignal(signal.SIGTERM)
    if handler not in (signal.SIG_DFL, None):
        if handler != signal.SIG_IGN:  # ignored: the main thread is ending already
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)  # the main thread ends the process sooner, unless it is stuck
    remove_private_directories()
    os._exit(_ORPHAN_EXIT_CODE)
