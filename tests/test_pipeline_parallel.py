"""fp32 on the CPU: a model in stages gives exactly the tokens that it gives in one piece, whatever is asked and scheduled.

Stages are threads (tests/support/thread_stages.py), each at work on another step. Small faults turn it red.
tests/serving/test_pipeline_parallel.py has stages as processes.
"""

from itertools import chain

import numpy as np
import pytest
import tiny_hybrids
import torch
from inline_engine import InlineEngine
from test_greedy_equality import is_greedy
from test_tensor_parallel import ALL, ASKED, GREEDY, HYBRIDS, PLAIN, alone, outputs, prompt
from thread_stages import LinksOfThreads, engine_of_stages
from tiny_models import ALL_MODELS, SPLIT_MODELS, tiny_model
from workers.test_runner import with_masks

from quire.ipc.sampling import SamplingParams
from quire.ipc.step.sections import FLAG_SAME_DECODE_ROWS, HEADER, STEP_MASK
from quire.workers.attention.kv_cache import cache_groups
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.pipeline import Pipeline

SIZES = [("split-llama", 2, 1), ("qwen3-tied", 3, 1), ("gemma3", 2, 1), ("split-mistral", 2, 2)]  # name, stages, ranks of each
SIZES += [(name, 2, 1) for name in HYBRIDS]
ONE_PIECE = ("gemma4", "gemma4-images")  # layers read others' keys and values, and inputs of their own
IN_STAGES = [name for name in ALL_MODELS if name not in ONE_PIECE]
EVERY = [
    *((name, 2, 1) for name in (*IN_STAGES, *SPLIT_MODELS)),
    *((name, 3, 1) for name in (*IN_STAGES, *SPLIT_MODELS)),
    *((name, 2, size) for name, size in ALL if size == 2 and name not in (*ONE_PIECE, "falcon-7b", "qwen3-tied")),
]
CASES = [*SIZES, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in SIZES)]


def small(name, stages, size=1, **more):
    """As test_tensor_parallel.small: sequences come in chunks and are preempted."""
    folder = tiny_model(name)
    num_blocks = 16 * len(cache_groups(read_model_config(folder).attention_specs(Parallel()))) or 1
    return engine_of_stages(folder, stages, size, budget=32, num_blocks=num_blocks, max_num_seqs=8, look_ahead=False, **more)


def assert_same(name, engine, exactly=True):
    """Equal tokens, of ranks that share a stage as of ranks that share a model. Chunks of prompts may be cut elsewhere."""
    (first, again, logprobs), expected = outputs(engine), alone(name)
    for got, want in ((first, expected[0]), (again, expected[1])):
        assert got.keys() == want.keys()
        for asked, tokens in got.items():
            length, params = ASKED[asked if asked in ASKED else asked.rpartition(", ")[0]]
            is_near = not exactly and params is GREEDY and is_greedy(name, prompt(length), tuple(tokens))
            assert tokens == want[asked] or is_near, f"{name}: {asked}"
    assert list(chain(*logprobs)) == pytest.approx(list(chain(*expected[2])), abs=1e-3)


@pytest.mark.parametrize("name", ONE_PIECE)
def test_what_layers_share_beside_hidden_states_stays_in_one_piece(name):
    with pytest.raises(ModelConfigError, match="run in one piece: --pipeline-parallel-size 1"):
        small(name, 2)


@pytest.mark.parametrize(("name", "stages", "size"), CASES)
def test_stages_give_the_tokens_of_one_piece(name, stages, size):
    engine = small(name, stages, size)
    assert_same(name, engine, exactly=size == 1)
    tiny_hybrids.assert_scarce(name, engine.scheduler.counters)


def test_a_stage_without_layers_of_a_group_has_its_block_tables_all_the_same():
    """Sliding layers are all in the first stage, say: the core has one table of each group for all."""
    config = read_model_config(tiny_model("gemma3"))
    groups = {len(r.ctx.cache.groups) for r in small("gemma3", len(config.layers)).runner.runners}
    assert groups == {2} and len({layer.attention.window for layer in config.layers}) == 2


def test_steps_are_counted_around():
    """After weeks: their numbers have 31 bits where they travel."""
    asked, found = [list(prompt(n)) for n in (5, 20)], []
    for engine in (InlineEngine(tiny_model("split-llama")), engine_of_stages(tiny_model("split-llama"), 2)):
        engine.scheduler._step = engine.scheduler._leaving.returned = STEP_MASK - 4
        found.append(engine.generate(asked, GREEDY))
        assert engine.scheduler._step > STEP_MASK
    assert found[0] == found[1]


def test_grammar_masks_bind():
    params, found = SamplingParams(temperature=1.0, seed=2, **PLAIN), []
    folder = tiny_model("split-llama")
    for engine in (InlineEngine(folder), engine_of_stages(folder, 2)):
        with_masks(engine, allowed=[17, 400, 600, 1690])
        found.append(engine.generate([list(prompt(n)) for n in (5, 20, 33)], params))
    assert found[0] == found[1] and set(found[0][0]) <= {17, 400, 600, 1690}


def test_a_step_that_ends_prompts_alone_leaves_nothing_due():
    """Tokens that no step needs are taken all the same, before they are as many as may be in flight."""
    engine = small("split-llama", 2)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for _ in range(6):
        engine.generate([list(prompt(n)) for n in (3, 9, 14)], params)
    assert len(engine.runner.runners[0].pipeline._due) <= 4 and engine.runner.runners[0].pipeline.rest()
    assert not engine.runner.runners[0].pipeline.rest()


DUMMIES = ["split-llama", *(pytest.param(name, marks=pytest.mark.slow) for name in IN_STAGES)]


@pytest.mark.parametrize("name", DUMMIES)
def test_dummy_weights_are_one_model_in_any_layout(name):
    folder, asked = tiny_model(name), [list(prompt(40))]
    engine = engine_of_stages(folder, 2, dummy=True)
    assert engine.generate(asked, GREEDY) == InlineEngine(folder, dummy=True).generate(asked, GREEDY)


# ------------------------------------------------------------------------------------------- faults must turn it red
class StaleHidden(LinksOfThreads):
    """Now and then a stage computes with what is left in its buffer."""

    count = 0

    def receive_hidden(self, out):
        self.count += 1
        before = out.clone()
        super().receive_hidden(out)
        if self.count % 13 == 0:
            out.copy_(before)


class SwappedTokens(LinksOfThreads):
    """Tokens come back with other rows'."""

    def receive_tokens(self, n):
        received = super().receive_tokens(n).clone()
        received[n // 2 :] = received[n // 2 :].flip(0)
        return received


@pytest.mark.parametrize("links", [StaleHidden, SwappedTokens])
def test_a_fault_of_a_link_is_seen(links):
    with pytest.raises(AssertionError):
        assert_same("split-llama", small("split-llama", 2, links=links))


def test_a_step_that_does_not_wait_for_its_tokens_is_seen(monkeypatch):
    monkeypatch.setattr(Pipeline, "_is_needed", lambda self, plan, step: False)
    with pytest.raises(AssertionError):
        assert_same("split-llama", small("split-llama", 2))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_wrong_micro_batch_is_seen(stage):
    engine = small("split-llama", 2)
    runner, step = engine.runner.runners[stage], engine.runner.runners[stage].step

    def of_another(words, read_masks):
        """Its rows are those that the other micro-batch has sent."""
        words[HEADER.at["micro_batch"]] ^= int(words[HEADER.at["flags"]]) & FLAG_SAME_DECODE_ROWS
        return step(words, read_masks)

    runner.step = of_another
    with pytest.raises(Exception):  # noqa: B017 (whichever is met first)
        assert_same("split-llama", engine)


def test_a_stage_whose_lengths_stand_still_is_seen(monkeypatch):
    monkeypatch.setattr("quire.workers.runner.advance", lambda *args: None)
    with pytest.raises(AssertionError):
        assert_same("split-llama", small("split-llama", 2))


def test_stages_hold_their_parts_alone():
    """Each tensor of the checkpoint is on one stage, but for a table that is tied to the head."""
    for name in ("split-llama", "qwen3-tied"):
        runners = small(name, 3).runner.runners
        names = [{n for n, _ in r.model.named_parameters()} for r in runners]
        shared = {n for i, some in enumerate(names) for other in names[i + 1 :] for n in some & other}
        assert shared == ({"model.embed_tokens.weight"} if name == "qwen3-tied" else set())
        whole = InlineEngine(tiny_model(name)).model
        assert set().union(*names) == {n for n, _ in whole.named_parameters()}
        assert [len(r.ctx.cache.k) for r in runners] == [1, 1, 1] and np.prod(runners[0].ctx.pool.counts.shape) == 0
        assert torch.is_tensor(runners[1].model.stage_buffer.hidden)
