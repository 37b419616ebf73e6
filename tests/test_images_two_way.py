"""Images of which all tokens see each other (Gemma 3 and 4): greedy output equals transformers', however prompts are cut.

No chunk ends within such an image, whatever else the step has; and the prefix cache may be hit before it, in it and behind it.
"""

from collections import Counter
from functools import cache

import pytest
import tiny_wrappers
import torch
from media_engine import PLACEHOLDERS, MediaEngine, patches_of, prompt, reference, square_of
from thread_ranks import Threads, Together
from thread_stages import EngineOfStages, LinksOfThreads, Stages, Wires

from quire.enginecore.scheduling.sequence import SequenceState
from quire.ipc.sampling import SamplingParams
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel
from quire.workers.pipeline import max_in_flight
from quire.workers.stages import stage_of

NAMES = ("gemma3-seen", "gemma3-narrow-seen", "gemma4-seen", "gemma4-shared-seen", "gemma4-unified-seen", "gemma4-causal-seen")
TWO_WAY = NAMES[:-1]
TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
LONGEST = 15  # tokens of an image


def image(name, height, width, seed=0):
    if name.startswith("gemma3"):
        return square_of(100 * seed + 10 * height + width)
    return patches_of(height, width, seed, *((1, 8) if "unified" in name else (2, 4)))


def prompts_of(name):
    def of(*sizes):
        return image(name, *sizes)

    return {
        "none": [TEXT],
        "first": [of(1, 3), TEXT],
        "last": [TEXT, of(2, 2)],
        "adjacent": [TEXT[:5], of(3, 2), of(1, 1), of(2, 5), TEXT[5:]],
        "apart": [of(4, 1), TEXT, of(2, 3), TEXT[::-1], of(3, 5), TEXT[:3], of(1, 2)],
    }


@cache
def wanted(name):
    found = {key: reference(name, parts, 20) for key, parts in prompts_of(name).items()}
    assert all(len(set(output)) >= 12 for output in found.values()) and len({tuple(o) for o in found.values()}) == len(found)
    assert max(len(set(output)) for output in found.values()) >= 16
    return found


def greedy(name, count=20, **more):
    if name.startswith("gemma4"):
        more["logit_bias"] = dict.fromkeys(PLACEHOLDERS, -100.0)
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


class Watched(MediaEngine):
    """chunks: (first position, end) of all chunks of sequences with images; none ends within an image."""

    def __init__(self, name, **more):
        super().__init__(tiny_wrappers.wrapped(name), is_whole=True, **more)
        self.name, self.chunks, schedule = name, [], self.scheduler.schedule
        self.left_out, self.most_left_out = Counter(), 0  # steps, one after the other, without a row that decodes, by slot

        def watched(now=0.0):
            decoding = {s.slot for s in self.scheduler.slots.holders if s.state is SequenceState.DECODE}
            made = schedule(now)
            if made is not None:
                self.left_out = Counter({slot: self.left_out[slot] + 1 for slot in decoding - set(made[1].slots.tolist())})
                self.most_left_out = max(self.most_left_out, *self.left_out.values(), 0)
            for seq, end in made[1].prefills if made is not None else ():
                if seq.items is not None:
                    first, last = seq.items.whole_span(end - 1)
                    assert last == end, f"a chunk ends at {end}, within {first} to {last}"
                    self.chunks.append(end)
            return made

        self.scheduler.schedule = watched

    def tokens(self, *prompts, count=20):
        return self.generate([prompt(*parts) for parts in prompts], greedy(self.name, count))


@pytest.mark.parametrize("budget", [LONGEST, 33, 512])
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_transformers(name, budget):
    engine, prompts = Watched(name, budget=budget), prompts_of(name).values()
    for _ in range(2):  # the second time from the prefix cache
        assert engine.tokens(*prompts) == list(wanted(name).values())
    assert len(engine.chunks) > 4


@pytest.mark.parametrize("name", NAMES)
def test_without_a_cache_of_prefixes(name):
    engine = Watched(name, enable_prefix_caching=False, budget=19)
    assert engine.tokens(*prompts_of(name).values()) == list(wanted(name).values())


def test_tokens_of_an_image_are_seen_by_those_before_them():
    """Without spans that go together the same engine computes something else, so the tests above see the difference."""
    name = "gemma3-seen"
    engine = MediaEngine(tiny_wrappers.wrapped(name))
    parts = prompts_of(name)["apart"]
    assert engine.generate([prompt(*parts)], greedy(name)) != [wanted(name)["apart"]]


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("name", TWO_WAY)
def test_hits_before_inside_and_behind_an_image(name, size):
    """Blocks are written by another prompt with the same beginning, and one of them may end anywhere in the image."""
    for before in (0, 3, 11, 17):
        parts = [TEXT[:before] or [9], image(name, 3, 5), TEXT[::-1]]
        want = reference(name, parts, 20)
        engine = Watched(name, block_size=size)
        engine.tokens([parts[0], parts[1], [before + 40]], count=2)
        hits = engine.scheduler.counters.cached_tokens
        assert engine.tokens(parts) == [want], before
        assert engine.tokens(parts) == [want], before
        assert engine.asked.total() == 1 and engine.scheduler.counters.cached_tokens > hits


@pytest.mark.parametrize("rows", [20, 64])
@pytest.mark.parametrize("name", ["gemma3-narrow-seen", "gemma4-seen"])
def test_preempted_requests_go_on(name, rows):
    """Few blocks: sequences are preempted, with their rows kept or gone."""
    prompts = [[TEXT, image(name, 3, 3, seed), TEXT[: seed + 2]] for seed in range(4)]
    options = {"num_blocks": 20, "budget": 24, "look_ahead": False, "enable_prefix_caching": rows == 64, "block_size": 8}
    engine = Watched(name, rows=rows, **options)
    assert engine.tokens(*prompts, count=24) == [reference(name, parts, 24) for parts in prompts]
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("name", ["gemma3-seen", "gemma4-seen"])
def test_rows_that_decode_do_not_keep_an_image_waiting(name):
    """The budget is as large as the image: rows that decode leave a step to it."""
    engine = Watched(name, budget=LONGEST, max_num_seqs=12)
    prompts = [[TEXT[: 3 + i]] for i in range(9)] + [[TEXT, image(name, 3, 5)], [TEXT[:4]]]
    found = engine.generate([prompt(*parts) for parts in prompts], [greedy(name, 60)] * 9 + [greedy(name)] * 2)
    assert found[9:] == [reference(name, parts, 20) for parts in prompts[9:]]
    assert found[:9] == [reference(name, parts, 60) for parts in prompts[:9]]


def test_images_do_not_keep_rows_that_decode_waiting():
    """Many images wait for a step of their own; behind each such step is one of the rows, however few it leaves them."""
    name = "gemma4-seen"
    engine = Watched(name, budget=LONGEST + 2, max_num_seqs=24)
    prompts = [[TEXT[: 3 + i]] for i in range(10)] + [[image(name, 3, 5, seed)] for seed in range(8)]
    found = engine.generate([prompt(*parts) for parts in prompts], [greedy(name, 30)] * 10 + [greedy(name, 3)] * 8)
    assert engine.most_left_out == 1 and found[-1] == reference(name, prompts[-1], 3)


def test_a_limit_on_chunks_does_not_cut_an_image():
    name = "gemma3-seen"
    engine = Watched(name, long_prefill_token_threshold=4)
    assert engine.tokens(*prompts_of(name).values()) == list(wanted(name).values())
    assert len(engine.chunks) > 20


def test_children_share_an_image():
    name = "gemma4-seen"
    parts = prompts_of(name)["adjacent"]
    engine = Watched(name)
    request = engine.add(prompt(*parts), greedy(name, n=2))
    outputs = engine.run()
    assert [outputs[request << 8 | child] for child in range(2)] == [wanted(name)["adjacent"]] * 2
    assert engine.runs == 3


def test_an_image_that_no_step_holds_is_refused():
    engine = Watched("gemma4-seen", budget=14)
    with pytest.raises(ValueError, match="15 tokens that one step computes together, which are at most 14 here"):
        engine.add(prompt(TEXT, image("gemma4-seen", 3, 5)), greedy("gemma4-seen"))
    engine.add(prompt(TEXT, image("gemma4-seen", 2, 7)), greedy("gemma4-seen"))


class FirstStage(MediaEngine, EngineOfStages):
    """The stage with the encoder."""


def test_every_stage_knows_how_far_tokens_see():
    stages = 3  # the second has two layers: in the last one alone nothing depends on it
    name, engines, wires = "gemma3-seen", [], Wires(stages)
    folder, options = tiny_wrappers.wrapped(name), {"budget": 19, "depth": max_in_flight(stages)}
    for index in range(stages):
        stage = stage_of(read_model_config(folder, sees=True), torch.float32, index, stages)
        parallel = Parallel(0, 1, stage=stage)
        if index:
            engine = EngineOfStages(folder, parallel=parallel, model_options={"sees": True}, **options)
        else:
            engine = FirstStage(folder, parallel=parallel, is_whole=True, **options)
        engine.runner.join(LinksOfThreads(wires, stage))
        engines.append(engine)
    first = engines[0]
    first.runner = Stages([engine.runner for engine in engines])
    prompts = [prompt(*parts) for parts in prompts_of(name).values()]
    assert first.generate(prompts, greedy(name)) == list(wanted(name).values())


@pytest.mark.parametrize("name", ["gemma3-seen", "gemma4-seen"])
def test_ranks_see_as_far_as_one(name):
    """Each of two ranks has half of the heads, and encodes all images itself."""
    group = Threads(2)
    engine, other = (Watched(name, parallel=Parallel(i, 2, exchange=group.rank(i)), budget=19) for i in range(2))
    take = engine.model.items.take

    def take_on_both(words):
        other.model.items.take(words.copy())
        take(words)

    engine.model.items.take = take_on_both
    engine.runner = Together([engine.runner, other.runner])
    assert engine.tokens(*prompts_of(name).values()) == list(wanted(name).values())
    assert engine.runs == other.runs == 9
