"""What a draft model computes behind a step, and to what sizes it is padded where it is captured."""

import itertools

import numpy as np
import pytest

from quire.ipc.step.plan import DTYPES, StepPlan
from quire.ipc.step.sections import SAMPLING_LOGPROBS, SAMPLING_RANDOM, SAMPLING_WINDOWS
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200
from quire.workers.speculation.pass_sizes import DraftPass, DraftPassSizes, pass_of


@pytest.fixture(autouse=True)
def on_an_h200():
    with using(H200):
        yield


def plan(decode, prompts, depth, drafts=0):
    sections = {"decode_rows": np.arange(decode, dtype=np.int32)} if decode else {}
    if prompts:
        rows = np.zeros(len(prompts), DTYPES["prefill_rows"])
        sections |= {"prefill_rows": rows, "prefill_tokens": np.zeros(sum(prompts), np.int32)}
    kind = SAMPLING_RANDOM | SAMPLING_LOGPROBS | SAMPLING_WINDOWS
    return StepPlan(1, sections, sampling_kind=kind, draft_tokens=drafts, draft_depth=depth)


@pytest.mark.parametrize(
    ("step", "reads_all", "expected"),
    [
        (plan(1, [], 3), False, DraftPass(16, 1, False, 3, SAMPLING_RANDOM)),
        (plan(2, [], 3, 6), False, DraftPass(32, 2, False, 3, SAMPLING_RANDOM)),
        (plan(30, [], 3, 90), False, DraftPass(120, 30, False, 3, SAMPLING_RANDOM)),
        (plan(30, [], 0), False, None),  # drafts are of no use now
        (plan(30, [], 0), True, DraftPass(60, 30, False, 0, 0)),  # each may lack the token before, too
        (plan(1, [], 3), True, DraftPass(2, 1, False, 3, SAMPLING_RANDOM)),
        (plan(1, [], 0, 3), True, DraftPass(16, 1, False, 0, 0)),
        (plan(64, [], 0, 8), True, DraftPass(136, 64, False, 0, 0)),
        (plan(0, [500], 0), False, DraftPass(501, 1, True, 0, 0)),  # prompts are read
        (plan(3, [500, 7], 2, 6), False, DraftPass(518, 5, True, 2, SAMPLING_RANDOM)),
        (plan(3, [900], 2), False, DraftPass(600, 4, True, 2, SAMPLING_RANDOM)),
        (plan(0, [], 3), True, None),
    ],
    ids=str,
)
def test_a_pass_has_room_for_the_tokens_of_its_step(step, reads_all, expected):
    assert pass_of(step, 600, reads_all=reads_all) == expected


def test_passes_are_padded_to_sizes_that_hold_them():
    sizes = DraftPassSizes(256, 8192 + 256, 10**9)
    for mixed, tokens, rows in itertools.product((False, True), (1, 5, 64, 700, 2049), (1, 4, 5, 200)):
        some = DraftPass(max(tokens, rows), rows, mixed, 3, 0)
        if (found := sizes.padded(some)) is not None:
            assert found.tokens >= some.tokens and found.rows >= some.rows and found[2:] == some[2:]
        else:
            assert mixed
    large = DraftPassSizes(256, 8192 + 256, 10**12)
    assert large.padded(DraftPass(8192 + 256, 256, True, 3, 0)) is None
    heads = DraftPassSizes(256, 8192 + 256, 10**9, reads_all=True)
    steps = [plan(1, [], depth, drafts) for depth in (0, 3) for drafts in (0, 3)]
    passes = {heads.padded(pass_of(step, 8192, reads_all=True)) for step in steps}
    assert len(passes) == 4 and {some.tokens for some in passes} == {2, 16}  # of one sequence
    assert DraftPass(2, 1, False, 0, 0) in passes & {*heads.at_start(3)}
    start = sizes.at_start(3)
    assert start and all(sizes.padded(some) == some for some in start)
    assert all(some.tokens <= 8192 + 256 for some in sizes.to_run(7))
