"""Two engines behind one port: one is killed in mid-stream, and the other and all that comes later notice nothing.

quire serve (HTTP) ─┬─ quire.enginecore ── quire.workers        quire route (HTTP) ─┬─ enginecore
                    └─ quire.enginecore ── quire.workers                            └─ enginecore
"""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import SMALL, Background, Daemon, EventStream, Launched, Served, command_of, ends_well, until

from quire.enginecore.loading.model_files import BUNDLED
from quire.frontend.client.llm import LLM
from quire.ipc.sampling import SamplingParams

PROMPT = "Once upon a time there was a little dog"
LONG = {"max_tokens": 1500, "min_tokens": 1500}
WORKER, CORE = "quire.workers", "quire.enginecore"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*SMALL, "--data-parallel-size", "2") as served:
        yield served.ready()
        assert served.end() == 0


class Routed(Served):
    """`quire route` on a free port."""

    def __init__(self, *arguments: str) -> None:
        Launched.__init__(self, "quire.frontend.cli.main", "route", "--port", "0", *arguments)


def metric(served: Served, name: str, engine: int) -> float:
    text = served.ask("GET", "/metrics").body.decode()
    found = re.search(rf'^(?:vllm|quire):{name}{{model_name="[^"]*",engine="{engine}"}} (\S+)$', text, re.M)
    return float(found[1]) if found else 0.0


def running(served: Served) -> tuple[float, float]:
    return metric(served, "num_requests_running", 0), metric(served, "num_requests_running", 1)


def two_streams(served: Served) -> list[EventStream]:
    """One on each engine: the second goes where less is to be done."""
    until(lambda: [metric(served, "engine_up", number) for number in (0, 1)] == [1, 1])  # known half a second late
    streams = [served.stream(text, **LONG) for text in (PROMPT, f"{PROMPT} and a cat")]
    for stream in streams:
        stream.wait_for_text()
    return streams


def engine_pids(served: Served) -> list[int]:
    """By number: it is in their addresses."""
    pids = {}
    for line in served.lines:
        if found := re.search(r"\[(\d+)\] ready after .*/engine-(\d)/", line):
            pids[int(found[2])] = int(found[1])
    return [pids[0], pids[1]]


def test_the_streams_of_an_engine_that_is_killed_go_on_at_the_other(served: Served) -> None:
    text = served.text(PROMPT, max_tokens=10)
    streams, before = two_streams(served), engine_pids(served)
    os.kill(before[0], signal.SIGKILL)
    ended = Background(lambda: [ends_well(stream) for stream in streams])
    until(lambda: metric(served, "engine_up", 0) == 0)
    assert served.health() == 200 and served.text(PROMPT, max_tokens=10) == text
    assert metric(served, "engine_up", 1) == 1
    assert ended.result() == [True, True]
    served.line(r"engine 0 ended unexpectedly \(signal SIGKILL\); the others get its requests until it is back; next start in")
    served.line("engine 0 is back")
    until(lambda: metric(served, "engine_up", 0) == 1)
    assert engine_pids(served)[1] == before[1] and engine_pids(served)[0] != before[0]
    for stream in two_streams(served):  # it is in rotation again
        stream.close()
    until(lambda: running(served) == (0, 0))


@pytest.mark.slow
def test_a_conversation_stays_where_its_turns_are_cached(served: Served) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"Tell me story {turn} about a dog, a cat, a house and a red ball."})
        answer = served.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0})
        usage = answer.json()["usage"]
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0.4 * usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})


@pytest.mark.slow
def test_a_worker_killed_delays_its_engines_requests_only(served: Served) -> None:
    streams = two_streams(served)
    core = psutil.Process(engine_pids(served)[0])
    (worker,) = [child for child in core.children() if WORKER in command_of(child)]
    worker.kill()
    assert served.health() == 200 and served.text(PROMPT, max_tokens=5)
    assert all(ends_well(stream) for stream in streams)
    until(lambda: metric(served, "engine_up", 0) == 1)


@pytest.mark.slow
def test_an_engine_that_stands_still_gets_nothing_until_it_turns_again(served: Served) -> None:
    streams = two_streams(served)
    core = psutil.Process(engine_pids(served)[0])
    core.suspend()
    try:
        until(lambda: metric(served, "engine_up", 0) == 0)
        for i in range(6):
            assert served.text(f"{PROMPT} {i}", max_tokens=2) is not None
        assert served.health() == 200
        assert all(ends_well(stream) for stream in streams)  # it is silent, and so they go on at the other
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced
            core.resume()
    until(lambda: metric(served, "engine_up", 0) == 1)


@pytest.mark.slow
def test_what_is_asked_of_an_engine_is_asked_of_all(served: Served) -> None:
    assert served.ask("POST", "/reset_prefix_cache").status == 200
    info = served.ask("GET", "/server_info?config_format=json").json()
    assert info["vllm_config"]["data_parallel_size"] == 2


@pytest.mark.slow
def test_a_stop_lets_streams_of_all_engines_end() -> None:
    with Served(*SMALL, "-dp", "2", "--frontends", "2") as another:
        another.ready()
        assert len(another.pids(CORE)) == len(another.pids(WORKER)) == 2
        streams = [another.stream(f"{PROMPT} {i}", max_tokens=150, min_tokens=150) for i in range(6)]
        for stream in streams:
            stream.wait_for_text()
        another.kill(signal.SIGTERM)
        for stream in streams:
            with stream:
                assert len(stream.text()) > 100
        assert another.wait() == 0 and "Traceback" not in another.output


@pytest.mark.slow
def test_nothing_survives_a_killed_server() -> None:
    with Served(*SMALL, "-dp", "2") as another:
        another.ready()
        another.kill(signal.SIGKILL)
        assert another.tree_has_ended(10.0)


@pytest.mark.slow
@pytest.mark.parametrize("frontends", ["1", "2"])
def test_engines_that_run_elsewhere_are_served_as_one(tmp_path: Path, frontends: str) -> None:
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in "ab"]
    with ExitStack() as stack:
        daemons = [stack.enter_context(Daemon(address, *SMALL)) for address in addresses]
        for daemon in daemons:
            daemon.ready()
        routed = stack.enter_context(Routed(*addresses, "--frontends", frontends)).ready()
        text = routed.text(PROMPT, max_tokens=10)
        daemons[0].kill(signal.SIGKILL)
        daemons[0].wait()
        routed.line(rf"an engine ended unexpectedly \(no connection to {addresses[0]}\); the others get its requests")
        assert routed.health() == 200
        assert [routed.text(PROMPT, max_tokens=10) for _ in range(4)] == [text] * 4
        daemons[1].kill(signal.SIGKILL)
        until(lambda: routed.health() == 503)
        daemons[0] = stack.enter_context(Daemon(addresses[0], *SMALL))
        until(lambda: routed.health() == 200)
        assert routed.text(PROMPT, max_tokens=10) == text
        routed.line(rf"the engine at {addresses[0]} is back")
        assert routed.end() == 0


@pytest.mark.slow
def test_engines_of_different_models_are_refused_at_start(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}.sock" for name in "ab"]
    with ExitStack() as stack:
        for address, name in zip(addresses, ("first", "second"), strict=True):
            stack.enter_context(Daemon(address, *SMALL, "--served-model-name", name)).ready()
        with Served("--engine", *addresses) as served:
            assert served.wait() == 1
            assert re.search("quire serve: .*'(first|second)'.*'(first|second)'", served.lines[-1])
            assert all(address in served.lines[-1] for address in addresses)


@pytest.mark.slow
def test_an_llm_of_two_engines_answers_as_one_does() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05}
    prompts = [f"{PROMPT} {i}" for i in range(12)]
    params = SamplingParams(max_tokens=12, temperature=0)
    with LLM(**options) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(**options, data_parallel_size=2) as llm:
        assert len(llm._own.background._cores) == 2
        assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert llm.reset_prefix_cache()


@pytest.mark.slow
def test_a_batch_is_run_by_all_engines(tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4}
    lines = [json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}) for i in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *SMALL, "-dp", "2"]
    with Launched("quire.frontend.cli.main", *words) as process:
        assert process.wait() == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 12


@pytest.mark.slow
def test_an_engine_that_cannot_start_again_is_done_without(tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED, tmp_path / "model")
    with Served(str(model), *SMALL, "-dp", "2") as served:
        served.ready()
        text = served.text(PROMPT, max_tokens=5)
        (model / "model.safetensors").unlink()
        first, second = engine_pids(served)
        os.kill(first, signal.SIGKILL)
        served.line("engine 0 cannot start again: .*safetensors.*; the others go on without it")
        assert served.health() == 200 and served.text(PROMPT, max_tokens=5) == text
        os.kill(second, signal.SIGKILL)
        assert served.wait() == 1
        assert re.match("quire serve: engine 1 cannot start again: .*safetensors", served.lines[-1])


@pytest.mark.slow
def test_requests_during_the_death_of_an_engine_are_answered(served: Served) -> None:
    """Whatever moment it is in, each request gets an answer of its own."""
    asked = [
        Background(lambda i=i: served.ask("POST", "/v1/completions", {"prompt": f"{PROMPT} {i}", "max_tokens": 60}))
        for i in range(24)
    ]
    os.kill(engine_pids(served)[1], signal.SIGKILL)
    answers = [each.result() for each in asked]
    assert {answer.status for answer in answers} == {200}
    until(lambda: metric(served, "engine_up", 1) == 1)
