"""Signals that end a process in order; but not one that nohup has started."""

import signal

from quire.ipc.process.command import stop_signals


def test_a_closed_terminal_stops_unless_that_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)
