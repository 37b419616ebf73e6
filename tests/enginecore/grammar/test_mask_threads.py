"""MaskThreads: results come back whole, in pieces, and wake the loop exactly as long as there are some."""

import json
import select
import threading
from types import SimpleNamespace

import llguidance
import numpy as np
import pytest
from toy_tokenizers import byte_level

from quire.enginecore.grammar import mask_threads as module
from quire.enginecore.grammar.language.texts import to_lark
from quire.enginecore.grammar.mask_threads import TOO_SLOW, MaskThreads, mask_threads
from quire.enginecore.grammar.matchers import Constraint, stop_bits
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.enginecore.grammar.work import Done, Work
from quire.enginecore.scheduling.sequence import SequenceState
from quire.ipc.structured_outputs import StructuredOutputs

VOCAB_SIZE = 416  # a whole number of words: the end of grammars is in one more
VOCABULARY = make_vocabulary(byte_level().to_str().encode(), VOCAB_SIZE)
EOS = byte_level().token_to_id("</s>")
LARK = to_lark(StructuredOutputs("choice", json.dumps(["ab", "a"])))


@pytest.fixture
def threads():
    made = MaskThreads(2, lambda: VOCABULARY)
    yield made
    made.close()


def work(lexer: int = 0, tokens: str = "", row: int = 0, state: SequenceState = SequenceState.DECODE) -> Work:
    matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, LARK, log_level=0)
    constraint = Constraint(matcher, lexer, None, stop_bits([EOS]), stop_bits([EOS]), frozenset([EOS]))
    ids = [VOCABULARY.tokenizer.greedy_tokenize(character)[0] for character in tokens]
    return Work(SimpleNamespace(state=state), constraint, ids, step=1, row=row)  # type: ignore[arg-type]


def all_of(threads: MaskThreads) -> list[Done]:
    found = []
    while threads.num_outstanding:
        found += threads.take(10.0)
    return found


def is_readable(threads: MaskThreads) -> bool:
    return bool(select.select([threads.fileno()], [], [], 0)[0])


def texts(mask: np.ndarray) -> set[str]:
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return {VOCABULARY.tokenizer.decode_str([int(i)]) if i != EOS else "END" for i in ids}


def test_each_gets_what_it_asked_for(threads):
    works = [work(i % 2, tokens, row=i) for i, tokens in enumerate(["", "a", "ab", "b", ""])]
    works.append(work(0, "a", row=-1))  # no row waits for its mask
    works.append(work(1, row=7, state=SequenceState.FINISHED))  # aborted meanwhile
    threads.submit(works)
    found = all_of(threads)
    masks = {w.row: texts(mask) for done in found for w, mask in zip(done.masked, done.masks, strict=True)}
    assert masks == {0: {"a", "ab"}, 1: {"b", "END"}, 4: {"a", "ab"}}
    assert [w.has_ended and w.failure is None for w in works] == [False, False, True, False, False, False, False]
    assert works[3].failure is not None and "by its grammar" in works[3].failure.message
    assert sum(len(done.works) for done in found) == len(works) and not is_readable(threads)


def test_a_matcher_that_fails_at_its_mask_ends_its_own_sequence(threads):
    works = [work(i, row=i) for i in range(3)]
    limits = llguidance.LLParserLimits(step_max_items=3)
    lark = to_lark(StructuredOutputs("json", '{"type": "object"}'))
    works[1].constraint.matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, lark, log_level=0, limits=limits)
    assert not works[1].constraint.matcher.is_error()
    threads.submit(works)
    [done] = all_of(threads)  # so few in one part
    assert done.ended == [works[1]] and "by its grammar" in works[1].failure.message
    assert [w.row for w in done.masked] == [0, 2] and [texts(mask) for mask in done.masks] == [{"a", "ab"}] * 2


def test_several_tokens_at_once_and_an_end_under_ignore_eos(threads):
    whole, beyond, ended = work(0, "ab", row=0), work(1, "abb", row=1), work(2, "a", row=2)
    ended.tokens.append(EOS)
    threads.submit([whole, beyond, ended])
    [done] = all_of(threads)
    assert done.ended == [whole, beyond, ended] and done.masked == [] and len(done.masks) == 0
    assert [w.has_ended and w.failure is None for w in done.ended] == [True] * 3  # tokens after an end are ignored


def test_the_descriptor_is_readable_while_there_is_something(threads):
    for _ in range(50):
        threads.submit([work(), work(1)])
        assert select.select([threads.fileno()], [], [], 10.0)[0]
        all_of(threads)
        assert not is_readable(threads) and threads.take() == []


def test_what_is_handed_over_while_others_are_taken_is_told_of_and_told_of_no_longer_once_taken(threads):
    """A thread hands over while the loop waits, looks, or is told by the descriptor: nothing is lost or left over."""
    handed = [Done([], [], [], np.empty((0, 1), np.int32), []) for _ in range(2000)]

    def hand_over() -> None:
        for done in handed:
            threads._hand_over(done)

    other = threading.Thread(target=hand_over, name="test-maker")
    other.start()
    found: list[Done] = []
    while len(found) < len(handed):
        if len(found) % 3 == 0:
            assert select.select([threads.fileno()], [], [], 10.0)[0]
        found += threads.take(0.01 if len(found) % 2 else 0.0)
    other.join()
    assert [id(done) for done in found] == [id(done) for done in handed]
    assert not is_readable(threads) and threads.take(0.0) == threads.take(0.01) == []


def test_many_come_in_pieces_and_a_slow_one_is_found(threads, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 60.0)
    monkeypatch.setattr(module, "LONG_S", 60.0)
    threads.submit([work(i) for i in range(40)])
    assert [(len(done.works), done.slow) for done in all_of(threads)] == [(20, []), (20, [])]  # one is sent as the next is made
    threads.submit([work(i) for i in range(200)])
    assert [len(done.works) for done in all_of(threads)] == [64, 64, 36, 36]
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    works = [work(i) for i in range(20)]
    threads.submit(works)
    assert [(len(done.works), done.slow) for done in all_of(threads)] == [(16, works[:16]), (4, works[16:])]
    assert all(w.constraint.is_slow for w in works)
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.0)
    again = [Work(w.seq, w.constraint, [], step=2, row=i) for i, w in enumerate(works)]
    threads.submit(again)
    assert [len(done.works) for done in all_of(threads)] == [1] * 20  # alone, each shows whether it is slow
    assert [w.failure for w in again] == [TOO_SLOW] * 20 and not any(w.failure for w in works)


def test_a_sequence_that_was_quick_alone_is_back_among_the_others(threads, monkeypatch):
    monkeypatch.setattr(module, "SLOW_S", 60.0)
    works = [work(i) for i in range(3)]
    for each in works:
        each.constraint.slow_for = 1
    threads.submit(works)
    assert [len(done.works) for done in all_of(threads)] == [1] * 3
    threads.submit([Work(w.seq, w.constraint, [], step=2, row=0) for w in works])
    assert [len(done.works) for done in all_of(threads)] == [3]


def test_a_matcher_is_used_by_one_thread_at_a_time(threads):
    first = work()
    threads.submit([first])
    first.constraint.slow_for = 1  # found slow while it has work: the next goes where that is
    threads.submit([Work(first.seq, first.constraint, [], step=2, row=0)])
    assert first.constraint.queue == 0
    assert sum(len(done.works) for done in all_of(threads)) == 2 and first.constraint.num_works == 0


def test_works_begin_at_once_and_the_loop_waits_no_longer(threads, monkeypatch):
    monkeypatch.setattr(module, "YIELD_S", 20.0)
    for tokens, is_slow in [("a", False), ("", False), ("a", True)] * 5:  # the last waits for no thread of its kind
        each = work(tokens=tokens)
        each.constraint.slow_for = is_slow
        threads.submit([each])
        threads.let_begin()
        all_of(threads)
    monkeypatch.setattr(module, "YIELD_S", 1e-3)
    threads.let_begin()
    threads.let_begin()


def test_parts_come_in_the_order_of_their_rows_and_works_without_masks_first(threads, monkeypatch):
    monkeypatch.setattr(module, "LONG_S", 60.0)
    works = [work(lexer=i % 3, row=i) for i in range(40)]
    works += [work(0, "ab", row=-1), work(0, row=41, state=SequenceState.FINISHED)]
    threads.submit(works)
    first, *others = all_of(threads)
    assert first.works == works[40:] and first.ended == works[40:41] and not first.masked
    assert [w.row for done in others for w in done.masked] == list(range(40)) and len(others) == 2
    assert all(done.works == done.masked for done in others)


def test_masks_that_took_long_come_in_one_part_the_next_time(threads, monkeypatch):
    for long_s, num_parts in ((60.0, 2), (0.0, 1), (60.0, 2)):
        monkeypatch.setattr(module, "LONG_S", long_s)
        threads.submit([work(row=i) for i in range(40)])
        assert len(all_of(threads)) == num_parts


def test_closing_waits_for_what_is_being_done_and_drops_the_rest(threads):
    works = [work(row=i) for i in range(1000)]
    works[0].constraint.slow_for = 1  # it has a thread of another kind
    threads.submit(works)
    ends = threads._threads
    threads.close()
    assert len(ends) == 2 and not any(thread.is_alive() for thread in ends)
    threads.close()


def test_a_few_cores_are_left_to_others():
    assert [mask_threads(n) for n in (1, 2, 4, 8, 16, 64)] == [1, 1, 1, 4, 12, 12]
