"""Requests for the operator's own logits processors in the core: refused, checked first, and ended if a class fails."""

import numpy as np
import pytest
from core_by_hand import CoreByHand, FakeWorkers, add, worker_template

from quire.enginecore.grammar.without_token import PROCESSOR_FAILED
from quire.enginecore.params_check import ParamsCheck
from quire.ipc.messages.frontend import RequestError, StepOutputs
from quire.ipc.messages.workers import CheckParams, ControlReply, ProcessorsInfo
from quire.ipc.step.control import decode_control, encode_control
from quire.ipc.step.sections import NO_TOKEN, SAMPLING_CUSTOM

ARGS = {"only": 3}


def use_processors(by_hand, **info) -> None:
    config = by_hand.core.requests.intake.config
    object.__setattr__(config, "processors", ProcessorsInfo(**{"all_requests": False, "checks_params": False, **info}))


def test_arguments_for_nobody_are_refused(by_hand):
    frontend = by_hand.frontend()
    frontend.send(add(1, extra_args=ARGS))
    error = by_hand.answer(frontend, RequestError)
    assert error.code == "invalid" and "--logits-processors" in error.message and error.message.startswith("vllm_xargs")
    frontend.send(add(2, extra_args={}, max_tokens=1))
    by_hand.answer(frontend, StepOutputs)


@pytest.mark.parametrize("all_requests", [False, True])
def test_only_those_that_are_seen_say_so_in_the_plan(by_hand, all_requests):
    use_processors(by_hand, all_requests=all_requests)
    plans = []
    send_plan = by_hand.workers.send_plan
    by_hand.workers.send_plan = lambda words: (plans.append(words.copy()), send_plan(words))
    frontend = by_hand.frontend()
    frontend.send(add(1, max_tokens=2))
    by_hand.until(lambda: plans and by_hand.core.scheduler.is_idle)
    assert all(bool(plan[2] & SAMPLING_CUSTOM) is all_requests for plan in plans)
    plans.clear()
    frontend.send(add(2, max_tokens=2, extra_args=ARGS))
    by_hand.until(lambda: plans and by_hand.core.scheduler.is_idle)
    assert all(plan[2] & SAMPLING_CUSTOM for plan in plans)


def test_a_row_without_a_token_ends_its_request_alone(by_hand):
    use_processors(by_hand)
    run = by_hand.workers._worker.run
    frontend = by_hand.frontend()

    def fails(plan):
        tokens = run(plan)
        if plan.sampling_kind & SAMPLING_CUSTOM:
            row = next(i for i, slot in enumerate(slots(plan)) if by_hand.core.scheduler.slots.sequence(slot).request_id == 1)
            tokens[row] = NO_TOKEN
        return tokens

    def slots(plan):
        return np.concatenate([plan.decode_rows, plan.prefill_rows["slot"]])

    by_hand.workers._worker.run = fails
    frontend.send(add(1, max_tokens=5, extra_args=ARGS))
    frontend.send(add(2, max_tokens=5))
    error = by_hand.answer(frontend, RequestError)
    assert error.id == 1 and error.code == "engine_error" and error.message == PROCESSOR_FAILED
    by_hand.workers._worker.run = run
    frontend.send(add(3, max_tokens=5, extra_args=ARGS))
    by_hand.until(lambda: by_hand.core.scheduler.is_idle)
    assert by_hand.core.supervisor.num_restarts == 0


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (("", b"only must be an id"), "invalid", "only must be an id"),
        (("the worker ended", b""), "engine_error", "worker failed while"),
        (("", b""), None, ""),
    ],
)
def test_a_request_waits_until_the_classes_have_looked_at_it(reply, code, text, monkeypatch):
    by_hand = CoreByHand()
    try:
        by_hand.core.preparing._preparers = (ParamsCheck(by_hand.workers),)
        use_processors(by_hand, checks_params=True)
        records = []
        monkeypatch.setattr(by_hand.workers, "_write", lambda kind, *parts: records.append(parts[0]))
        frontend = by_hand.frontend()
        frontend.send(add(1, max_tokens=1, extra_args=ARGS, logit_bias=dict.fromkeys(range(6), 1.0)))
        by_hand.until(lambda: records)
        request = decode_control(records.pop())
        assert isinstance(request, CheckParams) and request.params.extra_args == ARGS
        assert by_hand.core.preparing.num_sequences == 1 and not by_hand.core.scheduler.has_requests
        monkeypatch.undo()
        by_hand.workers._replied(ControlReply(0, request.id, *reply))
        if code is None:
            assert len(by_hand.answer(frontend, StepOutputs).tokens) == 4
        else:
            error = by_hand.answer(frontend, RequestError)
            assert error.code == code and text in error.message
    finally:
        by_hand.close()


def test_what_is_checked_fits_a_control_record():
    from quire.enginecore.params_check import _that_fits

    params = add(1, extra_args=ARGS, allowed_token_ids=list(range(100_000))).task.params
    assert encode_control(CheckParams(1, _that_fits(params))).nbytes < 1 << 16 and _that_fits(params).extra_args == ARGS


def test_a_request_that_comes_while_the_workers_start_is_looked_at_when_they_are_ready():
    workers = FakeWorkers(worker_template())
    by_hand = CoreByHand(workers, preparers=[ParamsCheck(workers)])
    try:
        use_processors(by_hand, checks_params=True)
        frontend = by_hand.frontend()
        workers.is_ready = False
        frontend.send(add(1, max_tokens=1, extra_args=ARGS))
        by_hand.until(lambda: by_hand.core.preparing.num_sequences == 1)
        workers.is_ready = True
        [ask] = workers.when_ready
        asked = []
        workers.send_control = lambda make, on_reply: asked.append((make(7), on_reply))
        ask()
        [(request, reply)] = asked
        assert isinstance(request, CheckParams) and request.params.extra_args == ARGS
        reply(ControlReply(0, 7, "", b""))
        assert len(by_hand.answer(frontend, StepOutputs).tokens) == 4
    finally:
        by_hand.close()


def test_workers_that_die_before_they_have_looked_at_a_request_are_asked_once_more():
    workers = FakeWorkers(worker_template())
    by_hand = CoreByHand(workers, preparers=[ParamsCheck(workers)])
    try:
        use_processors(by_hand, checks_params=True)
        frontend = by_hand.frontend()
        frontend.send(add(1, max_tokens=1, extra_args=ARGS))
        while not by_hand.core.preparing.num_sequences:
            by_hand.begin()
        workers.kill()
        assert by_hand.core.preparing.num_sequences == 1
        workers.start()
        [ask] = workers.when_ready
        workers.when_ready = []
        ask()
        workers.kill()  # the request may be the cause
        workers.start()
        error = by_hand.answer(frontend, RequestError)
        assert error.code == "engine_error" and not workers.when_ready
    finally:
        by_hand.close()
