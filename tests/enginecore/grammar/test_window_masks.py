"""Masks of windows in MaskThreads: one for each place that drafts lead to, once they have come, and no wait of the loop."""

import json
import threading
from types import SimpleNamespace

import llguidance
import numpy as np
import pytest
from toy_tokenizers import byte_level

from quire.enginecore.grammar import mask_threads
from quire.enginecore.grammar.bans import Bans
from quire.enginecore.grammar.language.texts import to_lark
from quire.enginecore.grammar.mask_threads import MaskThreads
from quire.enginecore.grammar.matchers import Constraint, Reasoning, stop_bits
from quire.enginecore.grammar.vocabulary import make_vocabulary
from quire.enginecore.grammar.work import Done, Window, Work
from quire.enginecore.scheduling.sequence import SequenceState
from quire.ipc.step.drafts import StepDrafts
from quire.ipc.step.sections import FIRST_PLACE
from quire.ipc.structured_outputs import StructuredOutputs

VOCAB_SIZE = 416
VOCABULARY = make_vocabulary(byte_level().to_str().encode(), VOCAB_SIZE)
EOS = byte_level().token_to_id("</s>")
STEP = 3


def ids(text: str) -> list[int]:
    return [EOS if character == "$" else VOCABULARY.tokenizer.greedy_tokenize(character)[0] for character in text]


@pytest.fixture
def threads():
    made = MaskThreads(2, lambda: VOCABULARY)
    yield made
    made.close()


class Step:
    """A step with rows of these drafts, which are written when `begin` is called."""

    def __init__(self, threads: MaskThreads, *drafts: str) -> None:
        self.threads = threads
        self.ids = [i for row in drafts for i in (FIRST_PLACE, *ids(row))]
        self.words = np.zeros(len(self.ids), np.uint64)
        self.drafts = StepDrafts(self.words, STEP)
        self.works: list[Work] = []
        self.asked: list[Work] = []

    def submit(self) -> None:
        self.threads.submit(self.asked)

    def begin(self) -> None:
        self.words[:] = np.asarray(self.ids, np.int32).view(np.uint32) | np.uint64(STEP << 32)

    def ask(self, choices: list[str], known: str = "", reasoning: Reasoning | None = None, bans: Bans | None = None) -> Work:
        lark = to_lark(StructuredOutputs("choice", json.dumps(choices)))
        matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, lark, log_level=0)
        constraint = Constraint(matcher, 0, reasoning, stop_bits([EOS]), stop_bits([EOS]), frozenset([EOS]))
        seq = SimpleNamespace(state=SequenceState.DECODE)
        tokens = Work(seq, constraint, ids(known))  # type: ignore[arg-type]
        window = Window(self.drafts, tokens, reasoning.copy() if reasoning is not None else None, bans)
        self.works.append(Work(seq, constraint, [], STEP, len(self.works), window=window))  # type: ignore[arg-type]
        self.asked += [tokens, self.works[-1]]
        return self.works[-1]

    def masks(self) -> list[dict[int, str]]:
        """Of each row: place -> what its mask allows."""
        found: list[dict[int, str]] = [{} for _ in self.works]
        while self.threads.num_outstanding:
            for done in self.threads.take(10.0):
                for work, place, mask in zip(done.masked, done.places, done.masks, strict=True):
                    found[work.row][place] = texts(mask)
        return found


def texts(mask: np.ndarray) -> str:
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    allowed = ("$" if i == EOS else VOCABULARY.tokenizer.decode_str([int(i)]) for i in bits)
    return "".join(sorted(text for text in allowed if len(text) == 1))  # of longer tokens nothing is drafted here


def test_each_place_that_drafts_lead_to_has_its_mask(threads):
    step = Step(threads, "ab", "", "xy", "bc", "a$b", "cde")
    for choices, known in (
        (["abc", "b"], ""),
        (["abc"], ""),
        (["abc"], ""),
        (["abc", "abd"], "a"),
        (["a", "ab"], ""),
        (["ab"], "a"),
    ):
        step.ask([*choices, "z" * 9], known)
    step.submit()
    step.begin()
    assert step.masks() == [
        {0: "abz", 1: "b", 2: "c"},
        {0: "az"},
        {0: "az", 1: "", 2: ""},  # behind a draft that is forbidden nothing is made, and no place is reached
        {0: "b", 1: "cd", 2: ""},  # the grammar has ended there
        {0: "az", 1: "$b", 2: ""},  # behind the model's end
        {0: "b", 1: "", 2: "", 3: ""},
    ]
    assert not any(work.has_ended for work in step.works)


def test_a_matcher_knows_nothing_of_the_drafts(threads):
    step = Step(threads, "ab", "ab")
    works = [step.ask(["abcab"], known) for known in ("", "abc")]
    step.submit()
    step.begin()
    assert [row[0] for row in step.masks()] == ["a", "a"]
    assert [work.constraint.matcher.consume_tokens(ids("ab")) for work in works] == [True, True]


def test_an_error_that_drafts_cause_is_not_the_matchers_own(threads):
    """Its limit of items is not met by the tokens that it has, but by those of its drafts."""
    step = Step(threads, "[aaaa")
    work = step.ask(["a"])
    lark = to_lark(StructuredOutputs("grammar", 'start: "[" s\ns: s s | "a" | "b" s'))
    limits = llguidance.LLParserLimits(step_max_items=12)
    work.constraint.matcher = llguidance.LLMatcher(VOCABULARY.tokenizer, lark, log_level=0, limits=limits)
    copy = work.constraint.matcher.deep_copy()
    copy.consume_tokens(ids("[aaaa"))
    copy.compute_bitmask()
    assert copy.is_error()
    step.submit()
    step.begin()
    assert step.masks()[0][0] == "["
    assert not work.has_ended and not work.constraint.matcher.is_error() and work.constraint.matcher.consume_tokens(ids("[aa"))


def test_the_loop_waits_for_no_drafts(threads, monkeypatch):
    """Tokens are given to matchers at once, and an end is known; the masks come when the step has begun."""
    monkeypatch.setattr(mask_threads, "PIECE", 1)
    step = Step(threads, "a", "a")
    step.ask(["ab", "ac"])
    ended = step.ask(["x"], "x")
    step.submit()
    done: list[Done] = []
    while threads.num_quick:
        done += threads.take(10.0)
    assert [work for each in done for work in each.ended] == [ended.window.tokens]
    assert threads.num_outstanding == 2 and not any(len(each.masks) for each in done)
    step.begin()
    assert step.masks() == [{0: "a", 1: "bc"}, {}]  # none for a sequence that has ended


@pytest.mark.parametrize("is_closed", [True, False])
def test_drafts_that_never_come_are_not_waited_for(threads, is_closed):
    step = Step(threads, "a")
    step.ask(["ab"])
    step.submit()
    if is_closed:
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("quire-masks")]
        threads.close()
        assert waiting and not any(thread.is_alive() for thread in waiting)
    else:
        step.drafts.is_given_up = True
        assert step.masks() == [{}]


def test_reasoning_and_bans_go_by_the_place(threads):
    reasoning = Reasoning(ids("."), 3)
    reasoning.push(ids("t")[0])
    step = Step(threads, "u.ab", "tu.", "ab", "b")
    step.ask(["abc"], reasoning=reasoning.copy())
    step.ask(["abc"], reasoning=reasoning.copy())
    step.ask(["abc", "abd", "x"], bans=Bans([EOS], 5, [ids("bc")], 3, []))
    nothing = step.ask(["b", "c"], bans=Bans([], 0, [ids("b"), ids("c")], 3, []))
    step.submit()
    step.begin()
    assert step.masks() == [{2: "a", 3: "b", 4: "c"}, {2: ".", 3: "a"}, {0: "ax", 1: "b", 2: "d"}, {}]
    assert nothing.has_ended and nothing.failure is not None


def test_results_say_which_rows_may_be_any_token(threads):
    step = Step(threads, "tu", "tu")
    free, bound = step.ask(["a"], reasoning=Reasoning(ids("."), None)), step.ask(["tub"])
    step.submit()
    step.begin()
    done = []
    while threads.num_outstanding:
        done += threads.take(10.0)
    assert [work for each in done for work in each.without_masks()] == [free]
    firsts = {work.row: mask for each in done for work, mask in each.first_masks()}
    assert firsts[free.row] is None and texts(firsts[bound.row]) == "t" and len(firsts) == 2
