"""Sizes of captured steps with LoRA adapters: tokens and samples differ in number, and steps that may come are captured."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from quire.ipc.step.plan import DTYPES, StepPlan
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200
from quire.workers.graph_sizes import BatchDescriptor, GraphSizes


@pytest.fixture(autouse=True)
def on_an_h200():
    with using(H200):
        yield


def test_steps_with_adapters_have_graphs_of_their_own():
    rows = np.zeros(9, DTYPES["prefill_rows"])
    plan = StepPlan(1, {"prefill_rows": rows, "prefill_tokens": np.zeros(60, np.int32)})
    sizes = GraphSizes(256, 8192, 1 << 30)
    batch = sizes.padded(plan)
    assert batch == BatchDescriptor(64, 64, True)
    both = sizes.padded(replace(plan, has_adapters=True))
    assert both == BatchDescriptor(64, 128, True, adapters=True), "tokens and samples must differ in number"
    few = GraphSizes(64, 8192, 1 << 30)
    assert few.padded(plan) is not None and few.padded(replace(plan, has_adapters=True)) is None
    decode = StepPlan(1, {"decode_rows": np.zeros(5, np.int32)}, has_adapters=True)
    assert sizes.padded(decode) == sizes.padded(replace(decode, has_adapters=False))._replace(adapters=True)


def test_steps_with_adapters_are_captured_at_start_if_they_may_come():
    without, captured = (GraphSizes(256, 8192, 1 << 30, captures_adapters=captures) for captures in (False, True))
    for some, more in ((without.at_start(), captured.at_start()), (without.ahead(), captured.ahead())):
        assert [batch for batch in more if not batch.adapters] == some and not any(batch.adapters for batch in some)
        assert len(some) < len(more) <= 2 * len(some)
        assert not any(batch.mixed and batch.tokens == batch.rows for batch in more if batch.adapters)
    assert not without.adapters_to_run() and {batch.mixed for batch in captured.adapters_to_run()} == {False, True}
