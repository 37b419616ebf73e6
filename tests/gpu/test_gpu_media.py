"""Prompts with images on a GPU: tokens equal transformers' in float32, eager and beside graphs; the encoder in bfloat16."""

import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, floats_of, image_of, prompt, reference
from test_image_failures import PROMPTS as MIXED
from test_image_failures import FailingEngine

from quire.ipc.sampling import SamplingParams

pytestmark = pytest.mark.gpu
NAMES = ("gpu-qwen2.5-vl-seen", "gpu-qwen3-vl-seen")
TEXT = [5, 81, 300, 17, 222, 4, 99, 410, 37, 51, 6, 7, 8, 144, 290, 333, 21]
PROMPTS = [
    [TEXT],
    [image_of(1, 3), TEXT],
    [TEXT, image_of(2, 2)],
    [TEXT[:5], image_of(3, 2), image_of(1, 1), image_of(2, 5), TEXT[5:]],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("name", NAMES)
def test_output_equals_transformers(name, budget, graphs):
    engine = MediaEngine(tiny_wrappers.wrapped(name), device="cuda", budget=budget, graphs=graphs)
    wanted = [reference(name, parts, 20) for parts in PROMPTS]
    for _ in range(2):
        assert engine.generate([prompt(*parts) for parts in PROMPTS], GREEDY) == wanted
    assert engine.runs == 5


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_equals_transformers(name, dtype, most):
    engine = MediaEngine(tiny_wrappers.wrapped(name), device="cuda", dtype=dtype)
    images = [image_of(2, 3), image_of(1, 1), image_of(5, 4), image_of(16, 20)]
    grids = torch.cat([image.tensors["image_grid_thw"] for image in images])
    pixels = [floats_of(image.tensors["pixel_values"]) for image in images]
    with torch.inference_mode():
        rows = engine.model.tower({"pixel_values": torch.cat(pixels).to("cuda", dtype)}, {"image_grid_thw": grids})
        for own, grid, found in zip(pixels, grids.split(1), rows.split([sum(i.runs) for i in images]), strict=True):
            want = tiny_wrappers.reference(name).model.get_image_features(own, grid)
            added = [x if isinstance(x, torch.Tensor) else x[0] for x in getattr(want, "deepstack_features", None) or []]
            want = torch.cat([want.pooler_output[0], *added], -1)
            assert (found.float().cpu() - want).abs().max() <= most * want.abs().max()


@pytest.mark.parametrize("fault", ["not_finite", "memory"])
def test_requests_that_need_a_failed_item_end_alone(fault):
    want = {key: reference(NAMES[1], parts, 12) for key, parts in MIXED.items()}
    engine = FailingEngine(NAMES[1], fault, device="cuda", graphs=True)
    for _ in range(2):
        assert engine.ask(MIXED) == {key: None if "bad" in key else tokens for key, tokens in want.items()}
    assert engine.faults == {fault}
    engine.broken = False
    assert engine.ask(MIXED) == want


def test_text_alone_launches_what_it_did():
    """A text-only step of a model that sees runs as the captured graphs that a model of text has."""
    engine = MediaEngine(tiny_wrappers.wrapped(NAMES[1]), device="cuda", graphs=True)
    assert engine.generate([prompt(TEXT)], GREEDY) == [reference(NAMES[1], [TEXT], 20)]
    assert engine.runs == 0


def test_the_largest_image_is_measured():
    engine = MediaEngine(tiny_wrappers.wrapped(NAMES[1]), device="cuda", rows=2048)
    with engine.runner.device.stream():
        assert engine.model.run_largest_item() > 0


RUNS = [[image_of(2, 3)], [image_of(9, 8), image_of(1, 1), image_of(2, 5)], [image_of(1, 3)], [image_of(30, 31)]]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_the_encoder_equal_eager_runs(name, dtype, most):
    """Sizes are captured at start within their time; a run that one has room for is a replay, and waits for nothing."""
    engine = MediaEngine(tiny_wrappers.wrapped(name), device="cuda", dtype=dtype, rows=2048)

    def rows():
        found = []
        for images in RUNS:
            pixels = torch.cat([floats_of(image.tensors["pixel_values"]) for image in images]).to("cuda", dtype)
            grids = torch.cat([image.tensors["image_grid_thw"] for image in images])
            torch.cuda.set_sync_debug_mode("error")
            found.append(engine.model.tower({"pixel_values": pixels}, {"image_grid_thw": grids}))
            torch.cuda.set_sync_debug_mode("default")
        return found

    with torch.inference_mode(), engine.runner.device.stream():
        eager = rows()
        engine.model.run_largest_item(graphs=True)
        graphs = engine.model.tower.__dict__["_graphs"]
        assert graphs.num_captured == len(graphs.sizes) >= 8
        replayed = rows()
        torch.cuda.synchronize()
    for one, other in zip(replayed, eager, strict=True):
        assert (one - other).float().abs().max() <= most * other.float().abs().max()


def test_requests_are_answered_by_graphs_of_the_encoder():
    engine = MediaEngine(tiny_wrappers.wrapped(NAMES[1]), device="cuda", graphs=True)
    with engine.runner.device.stream():
        engine.model.run_largest_item(graphs=True)
    wanted = [reference(NAMES[1], parts, 20) for parts in PROMPTS]
    for _ in range(2):
        assert engine.generate([prompt(*parts) for parts in PROMPTS], GREEDY) == wanted
