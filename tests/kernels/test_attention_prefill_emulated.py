"""Hopper's prefill attention as its source says it, run on the CPU: which keys, heads and parts, and no deadlock.

What the compiler makes of it is tested on a GPU (test_attention_prefill_hopper.py) and in its machine code
(test_wgmma_operands.py).
"""

import itertools
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, assert_matches

pytest.importorskip("triton")

from gluon_emulator import Emulator

from quire.kernels.attention import prefill_hopper, prefill_schedule
from quire.kernels.attention.prefill_schedule import PrefillWorkspace
from quire.kernels.tuning.configs import HopperPrefillConfig, PrefillConfig

WIDE, NARROW, TURNS = (HopperPrefillConfig(*fields, 24) for fields in ((128, 2, True), (64, 3, False), (64, 2, True)))
CAPPED_SINKS = {"softcap": 1.5, "sinks": True}


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    monkeypatch.setattr(prefill_schedule, "_hopper_supports", lambda *args: True)
    monkeypatch.setattr(prefill_hopper, "_kernel", Emulator(prefill_hopper._kernel))


def run(case: Case, config: HopperPrefillConfig, splits: int = 1, programs: int = 3) -> torch.Tensor:
    """Twice, with query tiles as `prefill_schedule` lists them, and each one's keys in so many parts."""
    tokens, heads = case.q.shape[0], (case.num_heads, case.num_kv_heads, case.head_dim)
    options = {"cache_dtype": case.k_cache.dtype, "config": PrefillConfig(128, 64, 8, 2, 1), "num_programs": 800}
    workspace = PrefillWorkspace.allocate(len(case.rows), tokens, *heads, "cpu", case.dtype, **options)
    workspace.partial_out.fill_(float("nan"))
    tiles = [-(-queries // workspace.tile_tokens) for _keys, queries in case.rows]
    entries = [(row, tile) for row, count in enumerate(tiles) for tile in reversed(range(count))]
    workspace.header.copy_(torch.tensor([len(entries), splits]))
    for at, (row, tile) in enumerate(entries):
        workspace.tile_rows[at], workspace.tile_indices[at] = row, tile
    workspace = replace(workspace, num_programs=programs)
    given = {"scale": case.scale, "window": case.window, "shape": case.score_shape, **case.scales}
    for _layer in range(2):
        case.out.fill_(float("nan"))
        prefill_hopper.launch(*case.tensors, workspace=workspace, config=config, **given)
        assert not workspace.counters.any()
    return case.out


def check(rows, heads, block_size, window, config, splits=1, programs=3, **options) -> None:
    case = Case(rows, *heads, block_size, window, dtype=torch.bfloat16, **options)
    assert_matches(run(case, config, splits, programs), case.expected(), case.dtype)


@pytest.mark.parametrize("config", [WIDE, NARROW, TURNS], ids=["wide", "narrow", "turns"])
def test_rows_and_parts_of_plain_attention(config):
    check([(300, 150), (40, 3), (1, 1)], (4, 2, 64), 16, 0, config)
    check([(500, 7), (60, 3)], (4, 2, 64), 64, 0, config, splits=3)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16 bit", "8 bit"])
@pytest.mark.parametrize("window", [1, 3, 63, 64, 65, 130])
def test_windows(window, cache_dtype):
    """What is before a window or behind a row is NaN; row 90's window begins in its last block, behind a block of its tile."""
    check([(300, 20), (90, 3), (129, 70)], (4, 2, 64), 16, window, NARROW, cache_dtype=cache_dtype)


def test_a_window_is_not_one_longer_or_shorter():
    case = Case([(80, 80)], 4, 2, 64, 16, 17, dtype=torch.bfloat16)
    got = run(case, NARROW)
    for window in (16, 18):
        case.window = window
        with pytest.raises(AssertionError):
            assert_matches(got, case.expected(), case.dtype)


@pytest.mark.parametrize("splits", [2, 5])
def test_windows_whose_keys_are_in_parts(splits):
    check([(500, 7), (70, 20), (1, 1)], (4, 2, 64), 16, 200, NARROW, splits, shape=CAPPED_SINKS)


@pytest.mark.parametrize("shape", [{"softcap": 1.5}, {"sinks": True}, CAPPED_SINKS], ids=["softcap", "sinks", "both"])
def test_softcaps_and_sinks(shape):
    check([(200, 100), (33, 33)], (4, 2, 64), 64, 0, WIDE, shape=shape)


@pytest.mark.parametrize("heads", [(3, 1, 64), (10, 2, 64), (7, 1, 64), (11, 1, 64), (71, 1, 64)])
def test_groups(heads):
    check([(100, 41), (20, 9)], heads, 16, 0, WIDE, shape={"sinks": True})


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16 bit", "8 bit"])
@pytest.mark.parametrize("heads", [(4, 2, 80), (3, 1, 192), (2, 1, 256)])
def test_sizes_of_heads(heads, cache_dtype):
    options = {"cache_dtype": cache_dtype, "scaled": cache_dtype is not None}
    check([(150, 70), (33, 33)], heads, 64, 0, NARROW, **options)
    check([(300, 5)], heads, 16, 0, TURNS, splits=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(3, 1, 128), (5, 1, 64), (9, 1, 64), (2, 1, 256), (6, 2, 192), (3, 3, 80)], ids=str)
@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_all_of_it_together(block_size, heads):
    rows = [[(300, 20), (65, 1), (1, 1)], [(257, 130), (33, 33)]]
    numbers = itertools.count()
    for window, cache_dtype, splits in itertools.product((0, 2, 64, 129), (None, torch.float8_e5m2), (1, 3)):
        number = next(numbers)
        options = {"cache_dtype": cache_dtype, "seed": number, "shape": CAPPED_SINKS if number % 3 else {}}
        check(rows[number % 2], heads, block_size, window, (NARROW, TURNS)[number // 2 % 2], splits, 1 + number % 4, **options)
