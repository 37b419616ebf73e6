"""Which rank runs where, and the file that names other hosts."""

from pathlib import Path

import pytest

from quire.enginecore.hosts.placement import HostEntry, PlacementError, RankPlacement, all_here, place, read_hosts_file
from quire.enginecore.hosts.ray_hosts import own_devices

A, B = HostEntry("tcp://10.0.0.2:7000", b"a" * 40, 2), HostEntry("tcp://10.0.0.3:7000", b"b" * 40, 2)
KEY = "4p$Bt}5L=}2VV-#>8:>^QIZ%s.ce1LkfR.n[#I26"


def test_without_other_hosts_all_are_here() -> None:
    assert all_here(2, 3) == ([], [RankPlacement(None, 3, True), RankPlacement(None, 4, True)])


def test_this_host_has_the_first_ranks_and_others_follow_in_their_order() -> None:
    placement = place([A, B], 6, 6, 0, range(4, 8))
    assert [(rank.host, rank.device_index) for rank in placement.ranks] == [
        (None, 4), (None, 5), (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert not any(rank.group_on_one_host for rank in placement.ranks)
    assert placement.ranks_of(None) == [0, 1] and placement.ranks_of(1) == [4, 5]


def test_this_host_has_the_last_ranks_if_the_last_group_says_the_results() -> None:
    placement = place([A], 4, 2, 2, range(8))
    assert [(rank.host, rank.device_index) for rank in placement.ranks] == [(0, 0), (0, 1), (None, 0), (None, 1)]
    assert all(rank.group_on_one_host for rank in placement.ranks)


def test_groups_that_cross_hosts_are_known() -> None:
    placement = place([HostEntry(A.address, A.public_key, 3)], 6, 2, 0, None)
    assert [rank.group_on_one_host for rank in placement.ranks] == [True, True, False, False, True, True]


def test_too_few_gpus_are_said_by_both_numbers() -> None:
    with pytest.raises(PlacementError) as error:
        place([A, B], 8, 8, 0, range(3))
    assert str(error.value) == (
        "8 workers need as many GPUs, and there are 7: 3 on this host (CUDA_VISIBLE_DEVICES counts), "
        "2 on tcp://10.0.0.2:7000, 2 on tcp://10.0.0.3:7000"
    )


def test_hosts_that_leave_nothing_for_this_one_are_too_many() -> None:
    with pytest.raises(PlacementError, match=r"^--hosts: 4 GPUs on other hosts for 4 workers: at least one"):
        place([A, B], 4, 4, 0, range(8))
    with pytest.raises(PlacementError, match="worker 2, which says the results, must be on this host; 1 of 5 are left"):
        place([A, B], 5, 1, 2, range(8))


def test_a_file_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# other hosts\n\n  tcp://10.0.0.2:7000\t{KEY} 8\n#tcp://x\ntcp://[fd00::3]:7000 {KEY} 4\n")
    assert read_hosts_file(str(file)) == [
        HostEntry("tcp://10.0.0.2:7000", KEY.encode(), 8),
        HostEntry("tcp://[fd00::3]:7000", KEY.encode(), 4),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"tcp://a:1 {KEY}", "a line is ADDRESS PUBLIC_KEY GPUS"),
        (f"ipc:///a {KEY} 1", "hosts are reached by tcp://host:port"),
        (f"tcp://a {KEY} 1", "a tcp address is tcp://host:port"),
        (f"tcp://a:* {KEY} 1", "where a host may listen"),
        (f"tcp://0.0.0.0:1 {KEY} 1", "where a host may listen"),
        ("tcp://a:1 short 1", "a key is 40 characters of z85"),
        (f"tcp://a:1 {KEY} 0", "'0' is no number of GPUs"),
        (f"tcp://a:1 {KEY} 65", "is no number of GPUs"),
        (f"tcp://a:1 {KEY} ²", "is no number of GPUs"),
        (f"tcp://a:1 {KEY} {'9' * 5000}", "is no number of GPUs"),
        (f"tcp://b:1 {KEY} 1", "tcp://b:1 is named twice"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"tcp://b:1 {KEY} 1\n\n{line}\n")
    with pytest.raises(PlacementError) as error:
        read_hosts_file(str(file))
    assert str(error.value).startswith(f"--hosts {file}, line 3: ") and why in str(error.value) and len(str(error.value)) < 400


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="cannot be read: No such file"):
        read_hosts_file(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(PlacementError, match="names no host"):
        read_hosts_file(str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlacementError, match="it is no text"):
        read_hosts_file(str(tmp_path / "binary"))


def test_gpus_that_ray_gives_are_found_among_those_that_are_seen() -> None:
    assert own_devices(["2", "3"], None) == [2, 3]
    assert own_devices(["7", "5"], "5,6,7") == [2, 0]
    for given, visible in ((["1"], "2,3"), (["GPU-1"], None)):
        with pytest.raises(PlacementError, match="Ray has given GPUs"):
            own_devices(given, visible)
