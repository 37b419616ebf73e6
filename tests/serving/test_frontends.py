"""One daemon and two frontends: they share it, one's death is its own affair, and the daemon's is survived by both."""

import http.client
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from serving import SMALL, SOON_S, Background, Daemon, Served, ends_well, until

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little dog"
LONG = {"max_tokens": 1500, "min_tokens": 1500}  # and no end of the story before


class Deployment:
    """A daemon and two frontends; the daemon may be replaced."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stack = ExitStack()
        self.daemon = self.new_daemon()
        self.first, self.second = (self.stack.enter_context(Served("--engine", address)) for _ in range(2))

    def new_daemon(self) -> Daemon:
        return self.stack.enter_context(Daemon(self.address, *SMALL))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(f"ipc://{tmp_path_factory.mktemp('deployment')}/engine.sock")
    with deployment.stack:
        deployment.first.ready()
        deployment.second.ready()
        yield deployment


def test_frontends_say_503_while_the_daemon_is_away_and_find_it_again(deployment: Deployment) -> None:
    daemon, first, second = deployment.daemon, deployment.first, deployment.second
    text = first.text(PROMPT, max_tokens=10)
    cut_off = [frontend.stream(PROMPT, **LONG) for frontend in (first, second)]
    for stream in cut_off:
        stream.wait_for_text()
    whole = Background(lambda: first.ask("POST", "/v1/completions", {"prompt": PROMPT, **LONG}))
    until(lambda: first.metric("num_requests_running") == 3)

    daemon.kill(signal.SIGKILL)
    assert daemon.wait() == -signal.SIGKILL  # and its worker is gone, too
    for frontend in (first, second):
        assert frontend.health() == 503
        answer = frontend.ask("POST", "/v1/completions", {"prompt": PROMPT})
        assert (answer.status, answer.error["code"]) == (503, "engine_down") and int(answer.headers["retry-after"]) > 0
        assert frontend.ask("GET", "/metrics").status == 200

        frontend.line(
            rf"the engine ended unexpectedly \(no connection to {deployment.address}\); requests get 503 until it is back"
        )
    deployment.daemon = deployment.new_daemon()  # at the same address, where a dead one's socket lies
    for frontend in (first, second):
        until(lambda frontend=frontend: frontend.health() == 200)
        assert frontend.text(PROMPT, max_tokens=10) == text
        frontend.line("the engine is back")
    assert all(ends_well(stream) for stream in cut_off) and whole.result().status == 200  # they only had to wait


def test_a_frontend_killed_in_mid_stream_takes_only_its_own_requests_along(deployment: Deployment) -> None:
    """The last one: it leaves nobody alive."""
    daemon, first, second = deployment.daemon, deployment.first, deployment.second
    short = {"max_tokens": 150, "min_tokens": 150}
    undisturbed = second.text(PROMPT, **short)
    assert first.text(PROMPT, **short) == undisturbed
    doomed = [first.stream(f"{PROMPT} {i}", **LONG) for i in range(3)]
    for stream in doomed:
        stream.wait_for_text()
    mine = second.stream(PROMPT, max_tokens=400, min_tokens=400)
    beginning = mine.wait_for_text()
    until(lambda: second.metric("num_requests_running") == 4)

    first.kill(signal.SIGKILL)
    assert until(lambda: second.metric("num_requests_running") <= 1) < SOON_S
    for stream in doomed:
        with pytest.raises((http.client.IncompleteRead, ConnectionError, AssertionError)):
            stream.text()
        stream.close()
    assert (beginning + mine.text()).startswith(undisturbed)
    mine.close()
    assert until(lambda: second.metric("kv_cache_usage_perc") == 0) < SOON_S
    assert second.health() == 200
    name = daemon.line(r"frontend (\w+) is gone; aborted 3 of its sequences")[1]
    assert any(line.endswith(f"frontend {name} is here") for line in daemon.lines)
    assert (second.end(), daemon.end()) == (0, 0)
    assert second.lines[-1].endswith("stopped")
    assert not Path(deployment.address.removeprefix("ipc://")).exists()
