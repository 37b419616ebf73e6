"""What memory a CPU's engine finds, by fake /proc and /sys, and how it is divided."""

import pytest

from quire.ipc.cpu_memory import (
    FRONTEND_BYTES,
    PARENT_BYTES,
    WORKER_BYTES,
    CpuNeeds,
    available,
    default_kv_bytes,
    process_bytes,
    refusal,
    room_for_kv,
)
from quire.ipc.memory_plan import GIB, MIB

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def machine(root, files, available_gib=16):
    files = {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available_gib << 20} kB\nSwapFree: 99999999 kB\n",
        **files,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


def limits(folder, version, limit, use, cached=0):
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    stat = f"{names[2]} {cached}\nanon 5\n"
    return {f"{folder}/{names[0]}": f"{limit}\n", f"{folder}/{names[1]}": f"{use}\n", f"{folder}/memory.stat": stat}


def test_without_a_cgroup_mem_available_counts_and_swap_does_not(tmp_path):
    assert available(machine(tmp_path, {})).num_bytes == 16 * GIB


def test_where_nothing_tells_nothing_is_known(tmp_path):
    assert available(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("inner", "outer", "found"), [(2, 4, 1), (4, 3, 2), (64, 64, 16)])
def test_the_smallest_room_along_the_path_counts(tmp_path, version, inner, outer, found):
    mount, line = (V1, "4:cpu,memory:/a/b\n0::/\n") if version == 1 else (V2, "0::/a/b\n")
    files = {"proc/self/cgroup": line, f"{V2}/cgroup.controllers": "memory"} if version == 2 else {"proc/self/cgroup": line}
    files |= limits(f"{mount}/a/b", version, inner * GIB, GIB) | limits(f"{mount}/a", version, outer * GIB, GIB)
    limit = "MemAvailable" if found == 16 else "the limit of the cgroup"
    assert available(machine(tmp_path, files)) == (found * GIB, limit)


@pytest.mark.parametrize(("version", "no_limit"), [(1, 9223372036854771712), (2, "max")])
def test_a_cgroup_without_a_limit_counts_for_nothing(tmp_path, version, no_limit):
    mount, line = (V1, "4:memory:/a\n") if version == 1 else (f"{V2}/unified", "0::/a\n")
    files = {"proc/self/cgroup": line, **limits(f"{mount}/a", version, no_limit, GIB)}
    assert available(machine(tmp_path, files)).num_bytes == 16 * GIB


@pytest.mark.parametrize("line", ["4:memory:/docker/0123\n", "4:memory:/../other\n"])
def test_a_container_sees_its_cgroup_at_the_mount(tmp_path, line):
    files = {"proc/self/cgroup": line, **limits(V1, 1, 3 * GIB, GIB)}
    assert available(machine(tmp_path, files)).num_bytes == 2 * GIB


def test_pages_of_files_can_be_dropped(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/a\n", **limits(f"{V1}/a", 1, 3 * GIB, 2 * GIB, cached=GIB)}
    assert available(machine(tmp_path, files)).num_bytes == 2 * GIB


def test_a_full_cgroup_has_no_room(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/a\n", **limits(f"{V1}/a", 1, GIB, 2 * GIB)}
    assert available(machine(tmp_path, files)).num_bytes == 0


# -------------------------------------------------------------------------------------------------- how it is divided
def test_all_ranks_and_engines_share_the_memory():
    one = CpuNeeds(GIB, 100 * MIB, ranks=1, engines=1, itemsize=4)
    four = one._replace(ranks=2, engines=2)
    for needs in (one, four, one._replace(frontends=3), four._replace(vocab_size=128_256)):
        copies = needs.ranks * needs.engines
        exact = needs.processes + copies * (GIB + 100 * MIB + 5)
        assert room_for_kv(exact, needs) == 5
        assert refusal(exact, needs, 5) is None and refusal(exact, needs, 6) is not None


def test_each_frontend_and_the_parent_of_several_are_counted():
    one, two, three = (process_bytes(1, 1, frontends) for frontends in (1, 2, 3))
    assert two - one == FRONTEND_BYTES + PARENT_BYTES and three - two == FRONTEND_BYTES


@pytest.mark.parametrize(
    ("vocab_size", "frontend", "core"), [(512, 42 + 2 * 19, 39 + 3 * 26), (128_256, 103 + 20, 131 + 3 * 105)]
)
def test_processes_take_no_more_than_is_counted(vocab_size, frontend, core):
    """Proportional set sizes that were measured, in MiB."""
    one, two, three = (process_bytes(1, 1, frontends, vocab_size) for frontends in (1, 2, 3))
    assert frontend * MIB < three - two < 2 * frontend * MIB
    assert core * MIB < one - (three - two) - WORKER_BYTES < 1.2 * core * MIB
    assert process_bytes(1, 2, 1, vocab_size) - one == one - (three - two)


@pytest.mark.parametrize(("room", "size"), [(None, GIB // 2), (4 * GIB, 2 * GIB), (40 * GIB, 8 * GIB), (-5, 0)])
def test_the_default_cache_is_half_of_what_is_left_and_at_most_8_gib(room, size):
    assert default_kv_bytes(room) == size
    assert default_kv_bytes(room, 16) == (size if room is None else min(size, GIB // 2)), "the bound is the machine's"


@pytest.mark.parametrize(
    ("weights", "activations", "kv", "begins"),
    [(4, 1, 1, "the weights do"), (2, 2, 1, "weights and activations do"), (1, 1, 4, "the KV cache does")],
)
def test_a_refusal_names_what_does_not_fit_and_both_numbers(weights, activations, kv, begins):
    needs = CpuNeeds(weights * GIB, activations * GIB, 1, 1, 4)
    text = refusal(3 * GIB, needs, kv * GIB)
    total = weights + activations + kv + process_bytes(1, 1) / GIB
    assert text.startswith(f"{begins} not fit") and f"{total:.2f} GiB are needed" in text and "3.00 GiB are available" in text
    assert "\n" not in text and " by the limit of the cgroup. " in refusal(3 * GIB, needs, kv * GIB, "the limit of the cgroup")
    assert ("--kv-cache-memory-bytes" in text) == (begins == "the KV cache does")
    assert ("--max-num-batched-tokens" in text) == (begins == "weights and activations do")


@pytest.mark.parametrize(
    ("gib", "is_packed", "itemsize", "helps"),
    [(4, False, 4, True), (4, True, 4, False), (4, False, 2, False), (2, False, 4, False)],
)
def test_bfloat16_is_advised_only_where_the_model_would_fit(gib, is_packed, itemsize, helps):
    needs = CpuNeeds(4 * GIB, GIB, 1, 1, itemsize, is_packed)
    assert ("--dtype bfloat16" in refusal(gib * GIB, needs, 1)) == helps


def test_fewer_copies_are_advised_where_there_are_several():
    one = CpuNeeds(4 * GIB, GIB, 1, 1, 4)
    assert "parallel" not in refusal(GIB, one, 1) and "ranks" not in refusal(GIB, one, 1)
    assert "--frontends" not in refusal(GIB, one, 1) and "--frontends" in refusal(GIB, one._replace(frontends=2), 1)
    assert "fewer ranks" in refusal(GIB, one._replace(ranks=2), 1)
    assert "--data-parallel-size" in refusal(GIB, one._replace(engines=2), 1)
