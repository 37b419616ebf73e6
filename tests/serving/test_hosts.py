"""`quire host` and `--hosts`: a model's ranks on several hosts, which are agents on loopback; what dies there, and what cannot
be."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hosts import WORKER, Agent, Keys
from inline_engine import InlineEngine
from serving import SMALL, EventStream, Launched, Served, ends_well, until

from quire.enginecore.loading.model_files import BUNDLED
from quire.ipc.links.curve import make_keys, write_keys
from quire.ipc.sampling import SamplingParams

PROMPT = "Once upon a time there was a little dog"
LONG = {"max_tokens": 1500, "min_tokens": 1500}
TIMEOUT_S = 2


class Spread:
    """A server with two ranks, of which the second is on another host, whose agent `other` is."""

    def __init__(self, keys: Keys, other: Agent, served: Served) -> None:
        self.keys, self.other, self.served = keys, other, served
        self.text = served.text(PROMPT, max_tokens=10)

    def running(self) -> EventStream:
        stream = self.served.stream(PROMPT, **LONG)
        stream.wait_for_text()
        return stream

    def assert_replaced(self, restarts: float) -> None:
        served = self.served
        until(lambda: served.metric("worker_restarts_total") == restarts + 1 and served.health() == 200)
        assert served.text(PROMPT, max_tokens=10) == self.text
        assert len(served.pids(WORKER)) == len(self.other.pids(WORKER)) == 1


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def spread(keys: Keys) -> Iterator[Spread]:
    with Agent(keys, "other") as other:
        flags = keys.flags(other)
        with Served(*SMALL, "-tp", "2", "--collective-timeout-s", str(TIMEOUT_S), *flags) as served:
            spread = Spread(keys, other, served.ready())
            until(lambda: served.metric("worker_restarts_total") == 0)  # the engine's numbers come with its first heartbeat
            yield spread
            assert served.end() == 0
        until(lambda: not spread.other.pids(WORKER))
        assert spread.other.end() == 0


@pytest.mark.slow
def test_two_hosts_give_the_tokens_of_one_and_a_killed_rank_is_named_with_its_host(spread: Spread) -> None:
    served, other = spread.served, spread.other
    assert len(served.pids(WORKER)) == len(other.pids(WORKER)) == 1
    ids, asked = [5, 600, 7, 1900, 2000, 40], ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})
    alone = InlineEngine(BUNDLED).generate([ids] * 2, [SamplingParams(max_tokens=24, ignore_eos=True, **p) for p in asked])
    for params, tokens in zip(asked, alone, strict=True):
        answer = served.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True, **params)
        assert answer["choices"][0]["token_ids"] == tokens
    restarts, before = served.metric("worker_restarts_total"), other.worker()
    stream = spread.running()
    before.kill()
    assert ends_well(stream)
    served.line(rf"worker 1 on host {other.address} ended unexpectedly \(signal SIGKILL\); 1 sequences in flight")
    spread.assert_replaced(restarts)
    assert other.worker().pid != before.pid


@pytest.mark.slow
def test_a_stopped_rank_of_another_host_is_named(spread: Spread) -> None:
    restarts, before = spread.served.metric("worker_restarts_total"), spread.other.worker()
    stream = spread.running()
    before.suspend()
    assert ends_well(stream)
    spread.served.line(rf"worker 1 on host {spread.other.address} was stopped by a signal; the others waited in an exchange")
    spread.assert_replaced(restarts)
    assert not before.is_running()


@pytest.mark.slow
def test_a_stopped_rank_of_the_engines_host_is_named(spread: Spread) -> None:
    restarts = spread.served.metric("worker_restarts_total")
    stream = spread.running()
    spread.served.processes()[-1]
    (worker,) = [p for p in spread.served.processes() if p.pid in spread.served.pids(WORKER)]
    worker.suspend()
    assert ends_well(stream)
    spread.served.line("worker 0 on this host was stopped by a signal; the others waited in an exchange")
    spread.assert_replaced(restarts)


@pytest.mark.slow
def test_a_stopped_agent_is_a_host_that_is_gone_until_it_goes_on(spread: Spread) -> None:
    restarts, agent = spread.served.metric("worker_restarts_total"), spread.other.agent
    stream = spread.running()
    agent.suspend()
    assert ends_well(stream)
    spread.served.line(
        f"host {spread.other.address} with worker 1: nothing was heard of it for .* s: .*; 1 sequences in flight"
    )
    with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced
        agent.resume()
    spread.assert_replaced(restarts)


@pytest.mark.slow
def test_a_killed_agent_is_dead_ranks_and_the_next_one_at_its_address_serves_on(spread: Spread) -> None:
    restarts, address = spread.served.metric("worker_restarts_total"), spread.other.address
    stream = spread.running()
    spread.other.agent.kill()
    assert ends_well(stream)
    spread.served.line(f"host {address} with worker 1: its agent, or the connection to it, is gone; 1 sequences in flight")
    assert spread.other.wait() == 1  # with its workers
    with spread.other:
        pass
    spread.other = Agent(spread.keys, "other", listen=address).__enter__()
    spread.assert_replaced(restarts)


@pytest.mark.slow
def test_a_killed_engine_leaves_no_worker_anywhere(keys: Keys) -> None:
    with Agent(keys, "left") as other:
        with Served(*SMALL, "-tp", "2", *keys.flags(other)) as served:
            served.ready()
            served.process.kill()
            served.process.wait()
            until(lambda: not served.pids() and not other.pids(WORKER))
        with Served(*SMALL, "-tp", "2", *keys.flags(other)) as served:  # the agent takes the next
            served.ready()
            assert served.text(PROMPT, max_tokens=5)
            assert served.end() == 0
        assert other.end() == 0


@pytest.mark.slow
def test_two_agents_and_four_ranks(keys: Keys) -> None:
    ids = [5, 600, 7, 1900, 2000, 40]
    (alone,) = InlineEngine(BUNDLED).generate([ids], [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)])
    with Agent(keys, "a", "--interface", "127.0.0.1") as a, Agent(keys, "b", "--interface", "127.0.0.2") as b:
        with Served(*SMALL, "-tp", "4", *keys.flags(a, b), "--collective-timeout-s", str(TIMEOUT_S)) as served:
            served.ready()
            assert (len(served.pids(WORKER)), len(a.pids(WORKER)), len(b.pids(WORKER))) == (2, 1, 1)
            answer = served.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == alone
            b.agent.kill()
            served.line(f"host {b.address} with worker 3: its agent, or the connection to it, is gone")
            until(lambda: not b.pids(WORKER))
            assert served.end() == 0
        assert a.end() == 0


# ----------------------------------------------------------------------------------------------- wrong at the start
def refused(*flags: str) -> str:
    """The last line of a server that does not start, of which nothing is left."""
    with Served(*SMALL, "-tp", "2", *flags) as served:
        assert served.wait() == 1
        return served.lines[-1].removeprefix("quire serve: ")


@pytest.mark.slow
def test_a_host_that_is_not_there_or_of_another_key_is_named(keys: Keys, tmp_path: Path) -> None:
    with Agent(keys, "wrong") as other:
        hosts = Path(keys.flags(other)[1])
        text = hosts.read_text()
        stranger = tmp_path / "stranger.key"
        write_keys(stranger, make_keys())
        at = f"host {other.address} with worker 1: "
        assert refused("--hosts", str(hosts), "--hosts-key-file", str(stranger)).startswith(
            at + "it does not admit this engine's key"
        )
        hosts.write_text(text.replace(other.public_key, make_keys().public.decode()))
        assert refused(*keys_flags(keys)) == at + (
            "its key is not the one that is expected, or what listens there is no `quire host`"
        )
        hosts.write_text(text)
        assert other.end() == 0
        assert refused(*keys_flags(keys)) == at + "it cannot be reached: no answer for 10 s"


def keys_flags(keys: Keys) -> tuple[str, ...]:
    return "--hosts", str(keys.hosts_file), "--hosts-key-file", str(keys.engine_file)


@pytest.mark.slow
def test_what_is_wrong_with_a_command_is_said_in_a_line(keys: Keys, tmp_path: Path) -> None:
    allow = str(keys.allow_file)
    for flags, line in (
        (("--key-file", str(tmp_path / "a"), "--allow-file", allow), "--listen is needed"),
        (("--listen", "ipc:///tmp/x", "--key-file", str(tmp_path / "a"), "--allow-file", allow), "hosts are reached by tcp://"),
        (("--listen", "tcp://127.0.0.1:*", "--key-file", allow, "--allow-file", allow), "others may read this secret key"),
        (
            ("--listen", "tcp://127.0.0.1:*", "--key-file", str(tmp_path / "a"), "--allow-file", "/no"),
            "/no is not there: write",
        ),
        (
            ("--listen", "tcp://127.0.0.1:*", "--key-file", str(tmp_path / "a"), "--allow-file", allow, "--interface", "eth99"),
            "--interface eth99: no network interface here has this name or address; there are lo (127.0.0.1",
        ),
    ):
        with Launched("quire.frontend.cli.main", "host", *flags) as host:
            assert host.wait() in (1, 2)
            assert line in host.lines[-1], host.lines


@pytest.mark.slow
def test_ranks_of_two_hosts_accept_alike(keys: Keys) -> None:
    """Each shares drafts out by tables of its own, so that one difference would part their tokens."""
    drafts = '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
    ids, asked = [5, 600, 7] * 9, ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.0})
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **p) for p in asked]
    alone = InlineEngine(BUNDLED).generate([ids] * len(asked), params)
    with Agent(keys, "drafts") as other:
        flags = "-tp", "2", *keys.flags(other), "--speculative-config", drafts, "--per-request-spec-decode-metrics", "summary"
        with Served(*SMALL, *flags) as served:
            served.ready()
            accepted = 0
            for given, tokens in zip(asked, alone, strict=True):
                answer = served.complete(ids, max_tokens=60, ignore_eos=True, return_token_ids=True, **given)
                assert answer["choices"][0]["token_ids"] == tokens
                accepted += answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            assert accepted > 0
            assert served.end() == 0
        assert other.end() == 0


@pytest.mark.slow
def test_two_stages_on_two_hosts(keys: Keys) -> None:
    """The last one is the engine's: it says the results."""
    ids = [5, 600, 7, 1900, 2000, 40]
    (alone,) = InlineEngine(BUNDLED).generate([ids], [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)])
    with Agent(keys, "stage") as other:
        with Served(*SMALL, "-pp", "2", *keys.flags(other), "--collective-timeout-s", "5") as served:
            served.ready()
            answer = served.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == alone
            stream = served.stream(PROMPT, **LONG)
            stream.wait_for_text()
            other.worker().kill()
            assert ends_well(stream)
            served.line(
                rf"worker 0 on host {other.address} ended unexpectedly \(signal SIGKILL\); 1 sequences in flight run again"
            )
            until(lambda: served.health() == 200)
            assert served.complete(ids, max_tokens=24, ignore_eos=True, return_token_ids=True)["choices"] == answer["choices"]
            assert served.end() == 0
        assert other.end() == 0
