"""Requests that go on after the loss of another engine: their outputs, seeds and grammars, and what is refused."""

import msgspec
import numpy as np
import pytest
from core_by_hand import EPOCH, MAX_MODEL_LEN, CoreByHand, add
from core_with_model import CoreWithModel
from fake_worker import VOCAB_SIZE
from replay_cases import REQUESTS, Outputs, alone, unkilled

from quire.ipc.messages.frontend import RequestError, Resume, StepOutputs


def resumed(request_id: int, outputs: list[list[int] | None], seed: int | None = None, num_tokens: int = 4, **params):
    request = add(request_id, num_tokens, **params)
    encoded = [None if ids is None else np.asarray(ids, np.int32).tobytes() for ids in outputs]
    task = msgspec.structs.replace(request.task, resume=Resume(encoded, seed))
    return msgspec.structs.replace(request, task=task)


@pytest.mark.parametrize("num_known", [0, 1, 7, 15])
def test_a_request_goes_on_after_the_output_that_it_had(by_hand: CoreByHand, num_known: int) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(resumed(1, [alone()[:num_known]], seed=5))
    outputs.until_ended(1)
    assert outputs.tokens[1 << 8] == alone()[num_known:]
    assert outputs.seeds == ({} if num_known else {1 << 8: 5})  # said once, with the first token
    counters = by_hand.core.scheduler.counters
    assert (counters.replays, counters.prompt_tokens) == (1, 0 if num_known else 4)


def test_children_that_have_ended_do_not_run_again_and_seeds_stay_theirs(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    frontend.send(resumed(1, [None, [], alone()[:4]], seed=2**64 - 2, n=3))
    by_hand.until(lambda: by_hand.core.scheduler.has_requests)
    seeds = {seq.child: seq.seed for seq in by_hand.core.scheduler.waiting}
    outputs.until_ended(1 << 8 | 1, 1 << 8 | 2)
    assert outputs.tokens == {1 << 8 | 1: alone(), 1 << 8 | 2: alone()[4:]}
    assert seeds in ({}, {1: 2**64 - 1, 2: 2**64}) and outputs.seeds == {1 << 8 | 1: 2**64 - 2}


def test_a_request_that_was_accepted_once_is_not_refused_by_a_full_queue(by_hand: CoreByHand) -> None:
    frontend = by_hand.frontend()
    outputs = Outputs(by_hand, frontend)
    object.__setattr__(by_hand.core.requests.backlog.bounds, "max_num_waiting", 1)
    for n in range(1, 9):
        frontend.send(resumed(n, [alone()[:3]]))
    outputs.until_ended(*range(1, 9))
    assert not outputs.failed


@pytest.mark.parametrize(
    "resume",
    [
        Resume([], None),
        Resume([None], None),
        Resume([b"", b""], None),
        Resume([b"abc"], None),
        Resume([np.array([-1], np.int32).tobytes()], None),
        Resume([np.array([VOCAB_SIZE], np.int32).tobytes()], None),
        Resume([np.zeros(16, np.int32).tobytes()], None),
        Resume([np.zeros(MAX_MODEL_LEN, np.int32).tobytes()], None),
        Resume([b""], -1),
        Resume([b""], 1 << 64),
    ],
    ids=lambda resume: str(resume)[:40],
)
def test_a_resume_that_cannot_be_is_refused(by_hand: CoreByHand, resume: Resume) -> None:
    frontend = by_hand.frontend()
    request = add(1)
    task = msgspec.structs.replace(request.task, resume=resume)
    try:
        msgspec.msgpack.encode(task)
    except OverflowError:
        return  # no frontend can send it
    frontend.send(msgspec.structs.replace(request, task=task))
    assert by_hand.answer(frontend, RequestError).code in ("invalid", "engine_error")
    frontend.send(add(2))
    by_hand.answer(frontend, StepOutputs)


@pytest.mark.parametrize("num_known", [1, 6, 11])
def test_seeds_penalties_and_grammars_go_on_on_another_engine(engine: CoreWithModel, num_known: int) -> None:
    expected = unkilled(engine)
    ids = []
    for params, outputs in zip(REQUESTS, expected, strict=True):
        ids.append(engine.next_id())
        data = np.asarray(engine.encode("Once upon a time"), np.int32).tobytes()
        resume = Resume([np.asarray(output[:num_known], np.int32).tobytes() for output in outputs], None)
        request = add(ids[-1])
        request = msgspec.structs.replace(
            request,
            epoch=EPOCH,
            inputs=msgspec.structs.replace(request.inputs, token_ids=data),
            task=msgspec.structs.replace(request.task, params=params, resume=resume),
        )
        engine.frontend.send(request)
    engine.until(lambda: all(engine.has_ended(i, p.n) for i, p in zip(ids, REQUESTS, strict=True)))
    got = [[engine.outputs[i << 8 | child].ids for child in range(p.n)] for i, p in zip(ids, REQUESTS, strict=True)]
    assert got == [[output[num_known:] for output in outputs] for outputs in expected] and not engine.errors
