"""Prompts with images: greedy output equals transformers', however prompts are cut, cached, evicted, preempted or split."""

import numpy as np
import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, floats_of, image_of, prompt, reference, rows_of, tiles_of

from quire.ipc.sampling import SamplingParams

NAMES = ("qwen2.5-vl-seen", "qwen3-vl-seen", "qwen3-vl-moe-seen")
TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
PROMPTS = {
    "none": [TEXT],
    "first": [image_of(1, 3), TEXT],
    "last": [TEXT, image_of(2, 2)],
    "adjacent": [TEXT[:5], image_of(3, 2), image_of(1, 1), image_of(2, 5), TEXT[5:]],
    "apart": [image_of(4, 1), TEXT, image_of(2, 3), TEXT[::-1]],
}


def greedy(count=20, **more):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def tokens(engine, *prompts, count=20):
    return engine.generate([prompt(*parts) for parts in prompts], greedy(count))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def wanted(name):
    found = {key: reference(name, parts, 20) for key, parts in PROMPTS.items()}
    assert all(len(set(output)) >= 12 for output in found.values()) and len({tuple(o) for o in found.values()}) == len(found)
    return found


@pytest.mark.parametrize("name", ["qwen3.5-seen", "qwen3.5-moe-seen"])
def test_recurrent_models(name):
    for parts in (PROMPTS["adjacent"], PROMPTS["last"]):
        want = reference(name, parts, 20)
        for budget in (19, 512):
            engine = MediaEngine(tiny_wrappers.wrapped(name), budget=budget)
            assert tokens(engine, parts, parts, [TEXT]) == [want, want, reference(name, [TEXT], 20)]


OTHERS = {
    "glm4.1v-seen": image_of,
    "glm4.5v-seen": image_of,
    "glm4.6v-seen": image_of,
    "mistral-small-3-seen": rows_of,
    "ministral3-seen": rows_of,
    "mistral4-seen": rows_of,
    "internvl-seen": lambda height, width, seed=0: tiles_of(height * width, 1, seed),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    make = OTHERS[name]
    for parts in ([TEXT], [TEXT[:5], make(3, 2), make(1, 1), make(2, 3), TEXT[5:]], [make(2, 3), TEXT, make(2, 3, 5)]):
        want = reference(name, parts, 20)
        assert len(set(want)) >= 10
        for budget in (7, 512):
            engine = MediaEngine(tiny_wrappers.wrapped(name), budget=budget)
            assert tokens(engine, parts, [TEXT], parts) == [want, reference(name, [TEXT], 20), want]


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_output_equals_transformers(name, wanted, budget):
    engine = MediaEngine(tiny_wrappers.wrapped(name), budget=budget)
    assert tokens(engine, *PROMPTS.values()) == list(wanted.values())
    images = [part for parts in PROMPTS.values() for part in parts if not isinstance(part, list)]
    assert engine.runs == engine.asked.total() == len(images)  # each travelled once and was encoded once
    assert tokens(engine, *PROMPTS.values()) == list(wanted.values())
    assert engine.runs == len(images)


def test_without_a_cache_of_prefixes(name, wanted):
    engine = MediaEngine(tiny_wrappers.wrapped(name), enable_prefix_caching=False, budget=13)
    assert tokens(engine, *PROMPTS.values()) == tokens(engine, *PROMPTS.values()) == list(wanted.values())
    assert engine.runs == 7  # rows are found by their digests all the same


@pytest.mark.parametrize("size", [16, 32])
def test_hits_before_inside_and_behind_an_image(size):
    """With blocks of 16 tokens, common prefixes end before the image (19 to 25), within it, and behind it."""
    name, image = "qwen3-vl-seen", image_of(3, 8)
    folder = tiny_wrappers.wrapped(name)
    for common in (17, 20, 30, 45):
        parts = [TEXT + [9, 9], image, TEXT[::-1]]
        want = reference(name, parts, 20)
        engine = MediaEngine(folder, block_size=size)
        ids, items = prompt(*parts)
        begun = ids[:common] if common <= items[0][0].spans[0][0] else ids
        if begun is ids:
            other = prompt(TEXT + [9, 9], image, [common])
            engine.generate([other], greedy(2))
        else:
            engine.generate([begun], greedy(2))
        assert tokens(engine, parts) == [want], common
        assert tokens(engine, parts) == [want], common
        assert engine.runs == 1


def test_an_image_in_cached_blocks_is_not_asked_for():
    name, parts = "qwen3-vl-seen", [image_of(2, 3), TEXT]
    engine = MediaEngine(tiny_wrappers.wrapped(name), rows=6)
    want = tokens(engine, parts)
    tokens(engine, [image_of(3, 2), TEXT])  # takes the rows
    assert engine.asked.total() == engine.runs == 2
    assert tokens(engine, parts) == want and engine.runs == 2


def test_images_of_one_size_differ():
    name = "qwen3-vl-seen"
    engine = MediaEngine(tiny_wrappers.wrapped(name))
    prompts = [[image_of(2, 3, seed), TEXT] for seed in range(3)]
    wanted = [reference(name, parts, 20) for parts in prompts]
    assert len({tuple(output) for output in wanted}) == 3
    for _ in range(2):
        assert tokens(engine, *prompts) == wanted


def test_room_for_one_image_serves_many(name):
    """Rows and bytes for one image only: requests with several images each take turns."""
    prompts = [[image_of(2, 2, seed), TEXT[seed:], image_of(2, 2, seed + 50), TEXT[: seed + 1]] for seed in range(6)]
    engine = MediaEngine(tiny_wrappers.wrapped(name), rows=4, arena=1, budget=11)
    assert tokens(engine, *prompts, count=6) == [reference(name, parts, 6) for parts in prompts]


@pytest.mark.parametrize("rows", [6, 64])
def test_preempted_requests_go_on(rows):
    """Few blocks: sequences are preempted, with their rows kept or gone."""
    name = "qwen2.5-vl-seen"
    prompts = [[TEXT, image_of(2, 3, seed), TEXT[: seed + 2]] for seed in range(4)]
    options = {"num_blocks": 9, "budget": 24, "look_ahead": False, "enable_prefix_caching": rows == 64}
    engine = MediaEngine(tiny_wrappers.wrapped(name), rows=rows, **options)
    assert tokens(engine, *prompts, count=24) == [reference(name, parts, 24) for parts in prompts]
    assert engine.scheduler.counters.preemptions > 0


def test_children_share_an_image():
    name, parts = "qwen3-vl-seen", [TEXT[:3], image_of(2, 3), TEXT]
    engine = MediaEngine(tiny_wrappers.wrapped(name))
    request = engine.add(prompt(*parts), greedy(n=2))
    outputs = engine.run()
    want = reference(name, parts, 20)
    assert [outputs[request << 8 | child] for child in range(2)] == [want, want]
    assert engine.runs == 1


def test_the_encoder_alone_and_in_a_batch_equals_transformers(name):
    engine = MediaEngine(tiny_wrappers.wrapped(name))
    images = [image_of(2, 3), image_of(1, 1), image_of(5, 4), image_of(2, 3, 7)]
    model = tiny_wrappers.reference(name).model
    tower = engine.model.tower
    with torch.inference_mode():
        grids = torch.cat([image.tensors["image_grid_thw"] for image in images])
        pixels = [floats_of(image.tensors["pixel_values"]) for image in images]
        together = tower({"pixel_values": torch.cat(pixels)}, {"image_grid_thw": grids}).split([sum(i.runs) for i in images])
        for own, grid, rows in zip(pixels, grids.split(1), together, strict=True):
            alone = tower({"pixel_values": own}, {"image_grid_thw": grid})
            found = model.get_image_features(own, grid)
            added = [x[0] for x in getattr(found, "deepstack_features", None) or []]
            want = torch.cat([found.pooler_output[0], *added], -1)
            scale = want.abs().max()
            assert (alone - want).abs().max() <= 1e-5 * scale and (rows - want).abs().max() <= 1e-5 * scale


def test_what_is_wrong_with_items_is_said():
    engine = MediaEngine(tiny_wrappers.wrapped("qwen3-vl-seen"), rows=5)
    ids, items = prompt(TEXT, image_of(2, 3))
    with pytest.raises(ValueError, match="larger than the encoder cache"):
        engine.add((ids, items), greedy())
    ids, items = prompt(TEXT, image_of(2, 2))
    with pytest.raises(ValueError, match="placeholder alone"):
        engine.add((list(np.roll(ids, 1)), items), greedy())
    plain = MediaEngine(tiny_wrappers.wrapped("qwen3-vl-seen"))
    plain.intake.config = plain.intake.config.__class__(**{**vars(plain.intake.config), "limits": engine_limits(plain)})
    with pytest.raises(ValueError, match="text alone"):
        plain.add((ids, items), greedy())


def engine_limits(engine):
    import msgspec

    return msgspec.structs.replace(engine.intake.config.limits, media=None)
