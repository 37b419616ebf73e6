"""Tuning tables: which is in force, that the H200's choices are those that were measured, and the command that makes one."""

import itertools
import json

import msgspec
import pytest
import torch
from msgspec.structs import replace

triton = pytest.importorskip("triton")

import bench  # noqa: E402
import sweep_cublas  # noqa: E402
import tune  # noqa: E402

from quire.kernels.attention import decode_schedule, prefill_schedule, rope_kv  # noqa: E402
from quire.kernels.elementwise import activation  # noqa: E402
from quire.kernels.linear import blas, linear, linear_hopper, norm_linear, split_linear  # noqa: E402
from quire.kernels.tuning import current  # noqa: E402
from quire.kernels.tuning.configs import DecodeConfig, PrefillConfig, SkinnyConfig  # noqa: E402
from quire.kernels.tuning.current import cached, for_device, table_path, using  # noqa: E402
from quire.kernels.tuning.default import DEFAULT  # noqa: E402
from quire.kernels.tuning.h100 import H100  # noqa: E402
from quire.kernels.tuning.h200 import H200  # noqa: E402
from quire.kernels.tuning.table import BF16  # noqa: E402

SMALL = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)]  # N, K of Qwen3-0.6B
LARGE = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]  # of Llama-3.1-8B
SHAPES = [*SMALL, *LARGE, (100, 72), (1024, 896), (896, 4864), (5, 8), (2048, 4097), (4096, 2049)]


@pytest.fixture
def on_an_h200():
    with using(H200):
        yield


# ------------------------------------------------------------------------------------------ what was measured on an H200
def skinny(rows, n, k, is_gated):
    block_k = triton.next_power_of_2(k)
    if rows == 1:
        if k >= 4096:
            return (False, 2, 2048, 4, 1) if k > 4096 else (False, 1, 4096, 8, 1)
        return (False, 4 if k <= 1024 else 2, block_k, 4 if k <= 2048 else 8, 1)
    if rows <= 4 and n <= 1024:
        return (False, 2, min(block_k, 1024), 4, 1)
    block_k = max(block_k, 16)
    if n <= 1024:
        return (True, 8, min(block_k, 512), 2, 3)
    if n <= 4096 and k >= 4096:
        return (True, 32, min(block_k, 512), 4, 3)
    return (True, 32 if n <= 4096 or is_gated else 64, min(block_k, 128), 4, 5 if n * k <= 2**25 else 3)


@pytest.mark.parametrize("is_gated", [False, True])
def test_few_rows_get_what_was_measured(is_gated, on_an_h200):
    for (n, k), rows in itertools.product(SHAPES, range(1, 17)):
        columns = n // 2 if is_gated else n
        assert linear.choose(rows, columns, k, is_gated) == SkinnyConfig(*skinny(rows, columns, k, is_gated))


def test_streamed_products_are_cut_as_measured(on_an_h200):
    def cut(rows, n, k, is_gated, split_k):
        sharing = 2 if is_gated else 1
        tiles, parts = triton.cdiv(n, 64 // sharing), 1
        while split_k and parts < (8 if rows <= 32 else 4) and tiles * parts * 2 <= 132 and k >= parts * 512:
            parts *= 2
        steps = triton.cdiv(k, 128 * parts) * triton.cdiv(tiles * parts, 132 * sharing)
        return 128, min(linear_hopper.max_stages(rows, 128, sharing, is_gated), steps), 132 * sharing, parts

    for (n, k), rows, (is_gated, split_k) in itertools.product(
        SHAPES, range(1, 65), ((False, False), (True, False), (False, True))
    ):
        found = linear_hopper.choose(rows, n, k, 132, is_gated=is_gated, split_k=split_k)
        assert tuple(found) == cut(rows, n, k, is_gated, split_k)


def test_many_rows_go_to_the_library_and_the_parts_that_were_measured(on_an_h200):
    def parts(rows, n, k):
        if n > 4096 or k % 256:
            return 0
        if n <= 2048 and n * k <= 1 << 23:
            return 4 if 64 < rows <= 160 else 2 if 160 < rows <= 400 else 0
        return 2 if 112 < rows <= 304 else 0

    for (n, k), rows in itertools.product(SHAPES, [*range(1, 700), 2047, 2048, 8192]):
        is_lt = min(n, k) >= 4096 and (17 <= rows <= 240 or 272 <= rows <= 624 or rows >= 2048)
        assert blas.library(rows, n, k, 2) == ("cublaslt" if is_lt else "cublas")
        assert split_linear.batched_splits(rows, n, k) == parts(rows, n, k)


def test_attention_and_what_is_beside_it_are_cut_as_measured(on_an_h200):
    def prefill(size, cache_size, head_dim, group):
        rows, wide = triton.next_power_of_2(group), head_dim > 128
        if size == 4:
            return PrefillConfig(max(rows, 16 if wide else 32), 16 if wide else 32, 4, 2, 2)
        return PrefillConfig(128, 64, 8, 3 if head_dim <= 64 or (cache_size == 1 and not wide) else 2, 1 if wide else 2)

    def decode(size, cache_size, head_dim, query_rows):
        wide = query_rows > 32
        if size == 4:
            return [DecodeConfig(32 if head_dim <= 128 else 16, 8 if wide else 4, 2, 2)]
        if head_dim > 128:
            return [DecodeConfig(32 if query_rows > 64 else 64, 8 if wide else 4, 2 if wide else 3, 1)]
        if wide:
            return [DecodeConfig(64, 8, 2, 1) if query_rows > 64 else DecodeConfig(64, 4, 3, 1)]
        last = DecodeConfig(64, 4, 2, 4)
        if cache_size == 1:
            return [DecodeConfig(128, 4, 3, 2), last]
        return [DecodeConfig(64, 4, 4, 1), DecodeConfig(64, 4, 3, 2, whole_tiles=4), last]

    dtypes = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float8_e4m3fn)]
    for (dtype, cache), dim, rows in itertools.product(dtypes, (16, 64, 80, 128, 160, 256), (1, 4, 8, 32, 33, 64, 128)):
        sizes = (dtype.itemsize, cache.itemsize, dim, rows)
        assert list(decode_schedule.choose_decode_configs(dtype, cache, dim, rows)) == decode(*sizes)
        assert prefill_schedule.choose_prefill_config(dtype, cache, dim, rows) == prefill(*sizes)
    assert [rope_kv.choose_tile(n) for n in (1, 256, 257, 9000)] == [1024, 1024, 2048, 2048]
    assert [tuple(activation.choose(n)) for n in (8, 300, 1024, 14336)] == [(8, 1), (512, 2), (1024, 4), (1024, 4)]
    assert [norm_linear.choose(k) for k in (1, 1024, 1025, 2048, 4096)] == [(2, 2), (2, 2), (2, 4), (2, 4), (2, 8)]


# -------------------------------------------------------------------------------------------------- which is in force
def test_a_gpu_gets_its_own_table_and_another_one_the_default(tmp_path):
    assert for_device("NVIDIA H200") is H200 and for_device("NVIDIA H100 80GB HBM3") is H100
    assert for_device("NVIDIA H100 PCIe") is DEFAULT and for_device("A GPU of tomorrow", tmp_path) is DEFAULT


def test_without_a_gpu_the_default_is_in_force(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(current, "_current", None)
    assert current.current() is DEFAULT


def test_an_operators_table_comes_first_and_one_that_is_none_is_named(tmp_path):
    path = table_path("NVIDIA H200", tmp_path)
    assert path.name == "nvidia_h200.json"
    path.write_bytes(msgspec.json.encode(replace(H200, step=replace(H200.step, slow_sizes=(96,)))))
    assert for_device("NVIDIA H200", tmp_path).step.slow_sizes == (96,)
    for text in ("{", "{}", msgspec.json.encode(H200).decode().replace('"slow_sizes"', '"slow_seizes"')):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"nvidia_h200\.json is not a tuning table"):
            for_device("NVIDIA H200", tmp_path)


@pytest.mark.parametrize("table", [DEFAULT, H200, H100])
def test_a_table_is_the_same_after_a_file(table, tmp_path):
    path = table_path("x", tmp_path)
    path.write_bytes(msgspec.json.encode(table))
    assert for_device("x", tmp_path) == table


def test_choices_are_made_anew_with_another_table():
    calls = []
    choose = cached(lambda n: calls.append(n))
    for table in (H200, H200, DEFAULT):
        with using(table):
            choose(1)
            choose(1)
    assert calls == [1, 1, 1]
    before = current.current()
    with pytest.raises(KeyError), using(H200):
        raise KeyError
    assert current.current() is before


def test_every_rule_list_ends_with_one_that_takes_all():
    for table in (DEFAULT, H200, H100):
        with using(table):
            assert linear.choose(16, 1 << 20, 1 << 16, True) and linear.choose(16, 1 << 20, 1 << 16, False)
            for size in (2, 4):
                assert table.attention.decode[-1].fits(2, 2, 1 << 10, 1 << 10) or size == 4
        assert table.linear[BF16].stream.max_rows <= 64


# ----------------------------------------------------------------------------------------- the command that makes one
def numbered(bench_, times, monkeypatch):
    """Cases whose calls take the time of their candidate."""
    monkeypatch.setattr(bench_, "_time", lambda calls, least=0: calls[0].us)

    class Call:
        def __init__(self, us, result):
            self.us, self.result = us, result

        def __call__(self):
            if self.us is None:
                raise RuntimeError("out of resource: shared memory")
            return torch.tensor(self.result)

    return [lambda c: [Call(*times[c])]]


def test_the_fastest_that_runs_and_agrees_is_taken(monkeypatch):
    on_cpu = bench.Bench(torch.device("cpu"), 60)
    times = {"now": (10.0, 1.0), "refused": (None, 1.0), "wrong": (1.0, 2.0), "faster": (9.0, 1.0), "slower": (11.0, 1.0)}
    cases = numbered(on_cpu, times, monkeypatch)
    assert on_cpu.fastest("x", "now", ["refused", "wrong", "slower", "faster"], cases) == "faster"
    assert [("refused" in each) or ("another" in each) for each in on_cpu.failed] == [True, True]
    times["faster"] = (9.9, 1.0)  # within what is noise
    assert on_cpu.fastest("x", "now", ["faster"], cases) == "now"
    times["now"] = (None, 1.0)
    assert on_cpu.fastest("x", "now", ["faster"], cases) == "now"


def test_without_time_nothing_changes(monkeypatch):
    late = bench.Bench(torch.device("cpu"), -1)
    assert late.fastest("x", 1, [2], []) == 1 and late.unmeasured
    assert tune.tune(late, tune.DRY_RUN, DEFAULT, ["decode"]) == DEFAULT


def test_a_sweep_that_fails_leaves_the_table_and_a_lost_gpu_ends_the_sweeps(monkeypatch):
    def failing(error):
        def sweep(bench_, workload, table):
            raise error

        return sweep

    changed = replace(DEFAULT, devices=("x",))
    sweeps = {"one": failing(RuntimeError("no")), "two": lambda *_: changed, "three": failing(bench.DeviceLost("gone"))}
    monkeypatch.setattr(tune, "SWEEPS", sweeps | {"four": lambda *_: DEFAULT})
    on_cpu = bench.Bench(torch.device("cpu"), 60)
    assert tune.tune(on_cpu, tune.DRY_RUN, DEFAULT, ["one", "two", "three", "four"]) == changed
    assert on_cpu.unmeasured == ["one", "three", "four"] and "the GPU is lost" in on_cpu.failed[-1]


def test_what_changed_is_told_by_entry():
    changed = replace(H200, step=replace(H200.step, slow_sizes=()))
    assert tune.changes(H200, changed) == ["step.slow_sizes: (448,) -> ()"]
    rules = list(H200.attention.decode)
    rules[1] = replace(rules[1], configs=(DecodeConfig(16, 4, 2, 2),))
    changed = replace(H200, attention=replace(H200.attention, decode=tuple(rules)))
    assert tune.changes(H200, changed) == ["attention.decode[1].configs[0].tile: 32 -> 16"]


def test_sizes_found_slow_and_ranges_found_fast():
    assert sweep_cublas.slow_sizes({416: 150.0, 448: 268.0, 480: 160.0, 512: 158.0}, 64) == (448,)
    assert sweep_cublas._ranges([(80, 4), (96, 4), (112, 0), (128, 2), (144, 2), (160, 4)], 65) == (
        (65, 96, 4),
        (113, 144, 2),
        (145, 160, 4),
    )
    sizes = sweep_cublas.step_sizes(H200.step, 65, 8192)
    assert sizes[:2] == [80, 96] and 448 in sizes and sizes[-1] == 8192


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1 and "no GPU" in capsys.readouterr().err


@pytest.mark.interpret
@pytest.mark.parametrize("more", [["batched"], pytest.param(["batched", "decode", "norm_linear"], marks=pytest.mark.slow)])
def test_a_dry_run_writes_a_table_that_can_be_read(tmp_path, capsys, more):
    path = tmp_path / "table.json"
    names = ["libraries", *more]
    assert tune.main(["--dry-run", "--seconds", "10", "--output", str(path), "--only", *names]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["device"] == tune.CPU and {"changed", "failed", "unmeasured", "seconds"} <= set(result)
    table = current.read_table(path)
    assert table.devices == (tune.CPU,) and msgspec.to_builtins(table) == msgspec.to_builtins(
        msgspec.convert(result["table"], type(table))
    )
    assert any("cublaslt" in failure for failure in result["failed"])  # which a CPU has not
