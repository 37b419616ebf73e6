"""Graphs of an encoder's runs, with a graph that runs its launches anew: padding changes no row, all else is eager."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny_wrappers
import torch
from media_engine import MediaEngine, floats_of, image_of

from quire.workers.models.media.tower_graphs import SIZES, TowerGraphs, padded, sizes_up_to

NAMES = ("qwen2.5-vl-seen", "qwen3-vl-seen", "qwen3.5-seen")
RUNS = [
    [image_of(2, 3)],
    [image_of(9, 8), image_of(1, 1), image_of(2, 5)],
    [image_of(1, 3)],
    [image_of(8, 8)],
    [image_of(2, 3)],
]
LARGE = [image_of(11, 9)]  # 396 patches


class Capturing:
    """It launches what was captured, into the same memory; replays: of all graphs."""

    def __init__(self):
        self.replays = 0

    def __call__(self, run, pool):
        return Replayed(self, run)


class Replayed:
    def __init__(self, owner, run):
        self._owner, self._run = owner, run

    def replay(self):
        self._owner.replays += 1
        self._run()


def arguments(images):
    pixels = torch.cat([floats_of(image.tensors["pixel_values"]) for image in images])
    return {"pixel_values": pixels}, {"image_grid_thw": torch.cat([image.tensors["image_grid_thw"] for image in images])}


def tower_of(name):
    return MediaEngine(tiny_wrappers.wrapped(name)).model.tower


@pytest.mark.parametrize("name", NAMES)
def test_padded_runs_equal_eager_ones(name):
    tower, how = tower_of(name), Capturing()
    with torch.inference_mode():
        compare(tower, how)


def compare(tower, how):
    want = [tower(*arguments(images)) for images in [*RUNS, LARGE]]
    tower.capture(64, how)  # tokens: 256 patches
    for _ in range(2):
        found = [tower(*arguments(images)) for images in [*RUNS, LARGE]]  # a run may not change the rows of one before
        for one, other in zip(found, want, strict=True):
            assert one.shape == other.shape and (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert how.replays == 2 * sum(sum(len(i.tensors["pixel_values"]) for i in images) <= 256 for images in RUNS) >= 8


def test_encoders_that_cannot_be_captured_stay_eager():
    tower, how = tower_of("glm4.1v-seen"), Capturing()
    with torch.inference_mode():
        tower.capture(64, how)
        tower(*arguments(RUNS[0]))
    assert how.replays == 0


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("all is taken"), RuntimeError("operation not permitted")])
def test_what_cannot_be_captured_is_run_eagerly(fault, caplog):
    def fails(run, pool):
        raise fault

    options = {"unit": 4, "most": 900, "width": 3, "dtype": torch.float32, "device": torch.device("cpu")}
    graphs = TowerGraphs(lambda pixels, given: pixels[::4], fails, **options)
    graphs.capture_all(lambda patches: {"cu_seqlens": torch.tensor([0, patches], dtype=torch.int32)})
    assert graphs(torch.zeros(8, 3), {}) is None and "eager" in caplog.text


def test_all_ranks_keep_the_graphs_that_each_has():
    options = {"unit": 4, "most": 900, "width": 3, "dtype": torch.float32, "device": torch.device("cpu")}
    graphs = TowerGraphs(lambda pixels, given: pixels[::4], lambda run, pool: SimpleNamespace(replay=run), **options)
    graphs.capture_all(lambda patches: {"cu_seqlens": torch.tensor([0, patches], dtype=torch.int32)})
    assert graphs.num_captured == len(graphs.sizes) == 5
    graphs.keep(2)
    sizes = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}
    assert graphs.num_captured == 2 and graphs(torch.zeros(8, 3), sizes) is None
    assert graphs(torch.zeros(900, 3), {"cu_seqlens": torch.tensor([0, 900], dtype=torch.int32)}) is not None


def test_sizes_waste_little():
    assert sizes_up_to(10, 4) == [256] and sizes_up_to(300, 4) == [256, 384] and sizes_up_to(10**6, 4) == list(SIZES)
    assert all(b <= 1.5 * a for a, b in pairwise(SIZES)) and len(SIZES) <= 16
    assert len(sizes_up_to(10**6, 9)) == len(SIZES) and all(size % 9 == 0 for size in sizes_up_to(10**6, 9))


def test_arguments_are_padded():
    order = torch.tensor([1, 0])
    given = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32), "window_index": order, "max_seqlen": 8}
    made = padded(given | {"interp_weights": torch.ones(8, 2)}, 8, 16, 4)
    assert made["cu_seqlens"].tolist() == [0, 8, 8, 8, 8] and made["window_index"].tolist() == [1, 0, 2, 3]
    assert made["max_seqlen"] == 16 and made["interp_weights"].sum(1).tolist() == [2.0] * 8 + [0.0] * 8
