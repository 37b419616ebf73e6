"""Which addresses media may come from: the URL is read strictly, and every address of its host is looked at."""

import pytest

from quire.frontend.media.addresses import is_allowed, parse
from quire.frontend.media.errors import MediaError
from quire.frontend.media.options import Domain, parse_domain

DOMAINS = (parse_domain("images.example.org"), parse_domain("store:9000=10.1.0.0/16"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://images.example.org/a/b.png?c=d#e", (True, "images.example.org", 443, "/a/b.png?c=d")),
        ("http://IMAGES.example.org", (False, "images.example.org", 80, "/")),
        ("http://images.example.org.:80/", (False, "images.example.org", 80, "/")),
        ("https://images.example.org:80/x", (True, "images.example.org", 80, "/x")),
        ("http://store:9000/x", (False, "store", 9000, "/x")),
    ],
)
def test_addresses_of_named_hosts(url, expected):
    assert parse(url, DOMAINS)[:4] == expected


@pytest.mark.parametrize(
    "url",
    ["http://images.example.org:8080/", "http://store/", "http://sub.images.example.org/", "http://example.org/",
     "http://images.example.org@evil.example/", "http://evil.example\\@images.example.org/", "http://images.example.org\\@x/",
     "http://user:pass@images.example.org/", "http://images.example.org\t/", "http://images.example.org/a b", "http:///x",
     "http://images.example.org%2f@x/", "http://[::1]/", "http://images.example.org:99999/", "http://images.example.org:/x",
     "http://images.example.org\r\nHost: x/", "http://images.example.org/\r\nX: y", "https:images.example.org/", "",
     "http://images.example.org/\u00e4", "http://\u0131mages.example.org/", "http://images.example.org?x", "x" * 9000],
)  # fmt: skip
def test_other_addresses_are_refused(url):
    with pytest.raises(MediaError):
        parse(url, DOMAINS)


PUBLIC = Domain("images.example.org")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_may_be_dialed(address):
    assert is_allowed(address, PUBLIC)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "240.0.0.1",
     "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1",
     "::ffff:8.8.8.8",
     "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "2001::1", "fec0::1", "not an address", "2001:db8::1"],
)  # fmt: skip
def test_others_may_not(address):
    assert not is_allowed(address, PUBLIC)


def test_a_named_network_may_be_private():
    store = parse_domain("store:9000=10.1.0.0/16")
    assert is_allowed("10.1.2.3", store) and not is_allowed("10.2.0.1", store) and not is_allowed("127.0.0.1", store)


@pytest.mark.parametrize("text", ["", "a/b", "a:b", "a:0", "a=b", "http://a", "*.a", "a:1:2"])
def test_domains_that_are_none(text):
    with pytest.raises(ValueError, match=r"host|port|network|address|does not"):
        parse_domain(text)
