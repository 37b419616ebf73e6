"""Network interfaces by name and by address; what is neither is refused with those that there are."""

import pytest

from quire.ipc.interfaces import Interface, find_interface


def test_loopback_by_name_and_by_any_of_its_addresses() -> None:
    assert find_interface("lo") == Interface("lo", "127.0.0.1") == find_interface("127.0.0.1")
    assert find_interface("127.0.0.2") == Interface("lo", "127.0.0.2")


@pytest.mark.parametrize("name", ["eth99", "", "192.0.2.77", "lo0", "127.0.0.1/8", "a" * 300])
def test_what_is_not_there_is_named_with_what_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"no network interface here has this name or address; there are .*lo \(127\.0\.0\.1"):
        find_interface(name)
