"""Grammar masks from the core's side: steps wait for them, and one that does not come ends only its own request.

The test plays the grammar: it makes rows of one request wait, and sends masks, or does not. The worker is core_by_hand's.
"""

import dataclasses

import numpy as np
import pytest
from core_by_hand import EPOCH, VOCAB_SIZE, CoreByHand, add
from fake_worker import solo_output

from quire.enginecore.grammar import masks as masks_module
from quire.enginecore.grammar.masks import StepMasks
from quire.enginecore.worker_profiles import WorkersFailed
from quire.ipc.messages.frontend import Abort, Finish, RequestError, StepOutputs
from quire.ipc.step.sections import NO_TOKEN

MASK = np.full((1, 2), -1, np.int32)


class Grammar:
    """Rows of request `request_id` have masks in every step."""

    def __init__(self, by_hand: CoreByHand, request_id: int) -> None:
        self.by_hand, self.request_id = by_hand, request_id
        self.steps: list[int] = []  # that wait for masks
        self._schedule = by_hand.core.scheduler.schedule
        by_hand.core.scheduler.schedule = self.schedule

    def schedule(self, now: float = 0.0):
        made = self._schedule(now)
        if made is None:
            return None
        plan, step = made
        sequences = self.by_hand.core.scheduler.slots.sequences
        rows = [i for i, slot in enumerate(step.slots) if sequences[slot].request_id == self.request_id]
        if rows:
            self.steps.append(step.step)
            self.row = np.asarray(rows, np.int32)
            plan = dataclasses.replace(plan, sections={**plan.sections, "mask_rows": self.row})
            step = dataclasses.replace(step, mask_rows=self.row)
        return plan, step

    def send(self) -> None:
        """Like GrammarSteps: masks that come too late are not sent."""
        core = self.by_hand.core
        if core._masks.send(self.steps[-1], self.row):
            core.workers.send_masks(self.steps[-1], self.row, MASK)


def tokens_of(message: StepOutputs) -> list[int]:
    return np.frombuffer(message.tokens, np.int32).tolist()


def test_a_step_with_masks_returns_once_they_came_and_holds_the_next_plan_until_then(by_hand):
    frontend, grammar = by_hand.frontend(), Grammar(by_hand, 1)
    frontend.send(add(1, 5, max_tokens=6))
    by_hand.until(lambda: grammar.steps)
    for _ in range(20):
        by_hand.turn()
    assert len(grammar.steps) == len(by_hand.core._in_flight) == 1  # the next would end the waiting
    tokens: list[int] = []
    while len(tokens) < 6:
        if by_hand.core._masks:
            grammar.send()
        by_hand.turn()
        if frontend.ready():
            tokens += tokens_of(by_hand.answer(frontend, StepOutputs))
    assert tokens == solo_output([*range(5)], 11, set(), VOCAB_SIZE) and not by_hand.core._masks


def test_a_mask_that_does_not_come_ends_its_request_and_nothing_else(by_hand, monkeypatch):
    monkeypatch.setattr(masks_module, "MASK_TIMEOUT_S", 0.0)
    ours, others = by_hand.frontend(), by_hand.frontend()
    others.send(add(2, 5, max_tokens=30))
    by_hand.until(lambda: by_hand.core.scheduler.num_running == 1)
    Grammar(by_hand, 1)
    ours.send(add(1, 5, max_tokens=30, n=2))
    error = by_hand.answer(ours, RequestError)
    assert (error.id, error.code) == (1, "engine_error") and "in time" in error.message
    tokens: list[int] = []
    while len(tokens) < 30:
        tokens += tokens_of(by_hand.answer(others, StepOutputs))
    assert tokens == solo_output([*range(5)], 35, set(), VOCAB_SIZE)
    by_hand.until(lambda: by_hand.core.scheduler.is_idle)
    assert not ours.ready() and by_hand.workers.generation == 1 and by_hand.core.supervisor.num_restarts == 0
    ours.send(add(3, 5, max_tokens=2))  # its slot and blocks are free
    assert tokens_of(by_hand.answer(ours, StepOutputs))


def test_a_mask_that_comes_too_late_is_dropped(by_hand, monkeypatch):
    monkeypatch.setattr(masks_module, "MASK_TIMEOUT_S", 0.0)
    frontend, grammar = by_hand.frontend(), Grammar(by_hand, 1)
    frontend.send(add(1, 5, max_tokens=30))
    by_hand.answer(frontend, RequestError)
    grammar.send()
    for _ in range(5):
        by_hand.turn()  # a record for it would be met where a plan is due
    assert by_hand.core.scheduler.is_idle


def test_no_token_is_the_workers_failure_where_no_mask_was_due(by_hand):
    frontend = by_hand.frontend()
    Grammar(by_hand, 1)
    frontend.send(add(1, 5, max_tokens=5))
    frontend.send(add(2, 3, max_tokens=5))  # shares no block, so both are in one step
    while len(by_hand.core.scheduler.waiting) < 2:
        by_hand.core._take_messages()
    by_hand.core._fill()
    step = by_hand.core._in_flight[-1].scheduled
    tokens = np.full(len(step.slots), 7, np.int32)
    other = next(row for row in range(len(step.slots)) if row not in step.mask_rows.tolist())
    tokens[other] = NO_TOKEN
    by_hand.workers.result_ring.write(step.step, tokens)
    with pytest.raises(WorkersFailed, match="outside the vocabulary"):
        by_hand.core._tokens(step)


def test_a_mask_that_does_not_come_for_an_aborted_request_leaves_its_ids_next_one_alone(by_hand):
    frontend, grammar = by_hand.frontend(), Grammar(by_hand, 1)
    frontend.send(add(1, 5, max_tokens=30))
    by_hand.until(lambda: grammar.steps)
    grammar.request_id = -1  # later steps have no masks
    frontend.send(Abort(EPOCH, [1]))
    frontend.send(add(1, 7, max_tokens=3))  # goes on at once: the aborted request's row is given up
    tokens: list[int] = []
    while len(tokens) < 3:
        message = by_hand.answer(frontend, StepOutputs | RequestError)
        assert isinstance(message, StepOutputs), message
        tokens += tokens_of(message)
    assert tokens == solo_output([*range(7)], 10, set(), VOCAB_SIZE)


@pytest.mark.parametrize("leave", ["abort", "finish", "vanish"])
def test_a_request_that_ends_while_its_mask_is_late_delays_no_other(by_hand, monkeypatch, leave):
    monkeypatch.setattr(masks_module, "MASK_TIMEOUT_S", 1e9)
    ours, others = by_hand.frontend(), by_hand.frontend()
    others.send(add(2, 5, max_tokens=30))
    by_hand.until(lambda: by_hand.core.scheduler.num_running == 1)
    grammar = Grammar(by_hand, 1)
    ours.send(add(1, 3, max_tokens=30))
    by_hand.until(lambda: grammar.steps)
    for _ in range(20):
        by_hand.turn()
    assert by_hand.core._masks
    match leave:
        case "abort":
            ours.send(Abort(EPOCH, [1]))
        case "finish":  # its frontend has seen a stop string
            ours.send(Finish(EPOCH, 1 << 8))
        case "vanish":
            ours.close()
    began, tokens = by_hand.core.supervisor.now, list[int]()
    while len(tokens) < 30:
        tokens += tokens_of(by_hand.answer(others, StepOutputs))
    assert tokens == solo_output([*range(5)], 35, set(), VOCAB_SIZE)
    assert by_hand.core.supervisor.now - began < by_hand.core._masks._timeout_s


def test_a_core_that_spins_sleeps_while_masks_are_made(by_hand, monkeypatch):
    """Their threads need the GIL, and the step cannot end before it has them."""
    frontend, grammar, core = by_hand.frontend(), Grammar(by_hand, 1), by_hand.core
    core.config = dataclasses.replace(core.config, spins=True)
    frontend.send(add(1, 5, max_tokens=8))
    by_hand.until(lambda: grammar.steps)
    waited: list[str] = []
    monkeypatch.setattr(core, "_spin", lambda step: waited.append("spun"))
    monkeypatch.setattr(core, "_poll", lambda timeout_s: waited.append("polled"))
    core._wait()
    grammar.send()
    core._expected.learn(core._in_flight[0].scheduled, 0.0)
    core._wait()
    assert waited == ["polled", "spun"]


def test_masks_are_given_up_before_their_step_is_overdue():
    masks = StepMasks(step_timeout_s=2.0)  # shorter than what masks have otherwise
    masks.expect(1, np.asarray([0]), now=10.0)
    assert masks.overdue(10.9) == [] and len(masks.overdue(11.0)) == 1


def test_masks_are_counted_row_by_row():
    masks = StepMasks(step_timeout_s=60.0)
    masks.expect(4, np.asarray([1, 2, 5]), now=10.0)
    masks.expect(5, np.asarray([0]), now=11.0)
    assert masks.send(4, np.asarray([5, 1])) and not masks.send(4, np.asarray([1])) and not masks.send(3, np.asarray([2]))
    assert masks.overdue(10.0 + masks_module.MASK_TIMEOUT_S - 0.1) == []
    [(step, rows)] = masks.overdue(10.0 + masks_module.MASK_TIMEOUT_S)
    assert (step, rows.tolist()) == (4, [2]) and masks
    assert masks.send(5, np.asarray([0])) and not masks
    masks.expect(6, np.asarray([0]), now=12.0)
    masks.clear()
    assert not masks


def test_masks_are_late_only_once_they_can_be_made(by_hand, monkeypatch):
    """A step's masks need the tokens of the step before it, which may take any time and has just returned."""
    frontend, grammar = by_hand.frontend(), Grammar(by_hand, 1)
    frontend.send(add(1, 5, max_tokens=8))
    by_hand.until(lambda: grammar.steps)
    core = by_hand.core
    grammar.send()
    core._fill()  # the next step: its row waits for the first one's token
    first, second = (step.scheduled.step for step in core._in_flight)
    later = core.supervisor.now + 100 * masks_module.MASK_TIMEOUT_S
    core._grammar.turn(later)
    assert core._masks.due(second) and core.scheduler.oldest_step == first
    monkeypatch.setattr(type(core.scheduler), "oldest_step", second)
    core._grammar.turn(later + masks_module.MASK_TIMEOUT_S)
    assert core._masks.due(second)
    core._grammar.turn(later + 2 * masks_module.MASK_TIMEOUT_S)
    assert not core._masks
