"""Lines that a peer can cause."""

import logging

from quire.ipc.links.limited_log import LINE_S, LINES, LimitedLog


def test_lines_are_few_however_many_are_asked_for(caplog, monkeypatch):
    log = logging.getLogger("quire.enginecore")
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    now = [0.0]
    limited = LimitedLog(log, clock=lambda: now[0])
    for i in range(1000):
        limited.warning("refused: %s", i)
    assert [r.getMessage() for r in caplog.records] == [f"refused: {i}" for i in range(LINES)]
    caplog.clear()
    for _ in range(3 * 8):  # three times LINE_S
        now[0] += LINE_S / 8
        limited.warning("refused: %s", "again")
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3 and lines[0] == "refused: again (997 such lines were left out before)"
    assert lines[1] == lines[2] == "refused: again (7 such lines were left out before)"
    caplog.clear()
    now[0] += 1000 * LINE_S
    for _ in range(1000):
        limited.warning("refused: %s", "later")
    assert len(caplog.records) == LINES  # quiet times are not saved up


def test_a_line_stays_one_and_short(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    LimitedLog(logging.getLogger("quire.enginecore")).warning("from %s: %s", "a\nWARNING forged\x1b[2J", "x" * 10_000)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "\n" not in line and "\x1b" not in line and len(line) < 450 and line.startswith("from a\\nWARNING forged")
