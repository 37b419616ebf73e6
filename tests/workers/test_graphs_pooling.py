"""Captured steps of models that pool, with the stand-ins for graphs of test_graphs.py: what is kept, and what runs when."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from workers.test_graphs import Graph, graphs, on_an_h200  # noqa: F401  # the last two are fixtures

from quire.workers.graphs import StepGraphs


@pytest.fixture
def runner(graphs):  # noqa: F811
    return graphs._runner


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(StepGraphs, "_run_forward", lambda self, batch: "states")
    monkeypatch.setattr(Graph, "replay", lambda self: found.append("replay"))
    return found


def step_that_pools(**more):
    plan = {
        "has_items": False,
        "num_tokens": 7,
        "num_samples": 2,
        "window": 1,
        "prefill_rows": [0, 1],
        "decode_rows": [],
        "sampling_kind": 0,
    }
    no_others = {"has_mask_rows": False, "wants_prompt_logprobs": False, "wants_candidates": False, "has_adapters": False}
    return SimpleNamespace(**{**plan, **no_others, "wants_vectors": True, **more})


def test_states_that_are_pooled_are_kept_and_given_between_forward_and_sampling(graphs, runner, calls):  # noqa: F811
    runner.pools = True
    assert graphs.run(step_that_pools(), None, calls.append)
    assert calls == ["replay", "states", "replay"]  # forward, vectors, sampling
    calls.clear()
    assert graphs.run(step_that_pools(wants_vectors=False), None, calls.append) and calls == ["replay", "replay"]


def test_without_a_head_nothing_is_sampled_and_no_row_decodes(graphs, runner, calls):  # noqa: F811
    runner.pools, runner.model.has_head = True, False
    graphs.warm_up()
    assert graphs.captured and all(batch.mixed for batch, _ in graphs.captured) and not graphs.kinds
    assert graphs.run(step_that_pools(), None, calls.append) and calls == ["replay", "states"]
    graphs.expect_masks()
    graphs.capture_masked_sampling_graph()
    assert not graphs.kinds
