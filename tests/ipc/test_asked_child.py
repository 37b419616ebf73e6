"""A child that is killed, stopped, slow or crashed while it answers: what it has judged, and what it has not."""

import os
from pathlib import Path

import asked
import pytest

from quire.ipc.process.asked_child import AskedChild, ChildLost


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(asked.__file__).parent), prepend=os.pathsep)
    child = AskedChild("asked")
    assert child.start(asked.AskedConfig) == b"ready" and child.is_there

    def question(word: str, times: int = 0, timeout_s: float = 5.0, **more: float) -> bytes | None:
        return child.ask(f"{word} {times} {tmp_path / word}".encode(), timeout_s, **more)

    question.child = child
    yield question
    child.close()


@pytest.mark.parametrize("word", ["kill", "stop", "end", "crash"])
def test_a_child_that_is_lost_once_is_asked_once_more(ask, word):
    assert ask(word, 1) == b"answer"
    assert ask(word, 1) == b"answer" and ask.child.is_there  # it is another one, and well


@pytest.mark.parametrize("word", ["kill", "stop", "end"])
def test_what_two_children_were_kept_from_judging_is_not_judged(ask, word):
    with pytest.raises(ChildLost):
        ask(word, 2)
    assert not ask.child.is_there
    assert ask.child.start(asked.AskedConfig) == b"ready" and ask(word, 2) == b"answer"


def test_a_question_at_which_two_children_crash_is_at_fault(ask):
    assert ask("crash", 9) == b"" and not ask.child.is_there


def test_time_is_the_childs_own(ask):
    assert ask("sleep", timeout_s=0.1) == b"answer"
    assert ask("spin", timeout_s=0.2) is None and not ask.child.is_there


def test_a_question_that_waits_for_others_has_so_many_seconds(ask):
    assert ask("sleep", wall_s=0.2) is None and not ask.child.is_there
    assert ask.child.start(asked.AskedConfig) == b"ready" and ask("sleep", wall_s=30.0) == b"answer"
