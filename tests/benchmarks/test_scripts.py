"""What the other scripts compute, without a GPU and without a server."""

import argparse
import asyncio
import csv
import json
import socket
import subprocess
import sys
from pathlib import Path

import acceptance
import agent_session
import broken_adapters
import ceilings
import hostcost_admission
import http_sse
import numpy as np
import offline
import plot
import pytest
import random_adapters
import serve
import servers
import soak
import soak_vectors
import structured
import structured_host
import workloads
from ceilings import Costs, Measured
from sse_client import Answer

from quire.ipc.adapters import AdapterLimits
from quire.workers.adapters.peft import read_adapter
from quire.workers.models.family_table import read_model_config


@pytest.fixture
def costs():
    found = Measured(1e12, {1: 0.001, 16: 0.001, 64: 0.002, 8192: 0.2}, {1: 1e-4, 1024: 5e-4}, 1e14)
    return Costs(read_model_config("enginecore/loading/bundled"), found)


@pytest.mark.parametrize("case", ["http", "all"])
def test_scripted_streams_come_to_their_end(case, caplog):
    counts = asyncio.run(http_sse.run(case, num_streams=3, steps=4))
    assert counts.num_bytes > 3 * 4 * 100 and counts.seconds > 0
    assert asyncio.run(http_sse.answer_whole(2)).num_bytes > 0
    assert caplog.records == []


def test_the_stages_of_steps_with_masks_follow_each_other():
    how = {"threads": 2, "same_schema": False, "titles": "alike", "warm_up": 1}
    args = argparse.Namespace(model="enginecore/loading/bundled", rows=3, steps=8, **how)
    found = structured_host.measure(args)
    assert {len(found[name]) for name in structured_host.ORDER} == {len(found["path"])} and len(found["path"]) >= 4
    assert all(micros > 0 for name in ("tokens", "update", "path", "staged", "last") for micros in found[name])


def test_the_host_cost_of_a_step_is_measured_on_the_real_core():
    command = [sys.executable, "benchmarks/hostcost.py", "--rows", "2", "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))["2"]
    assert stages.keys() == {"turn", "plan", "publish", "visible"} and all(points["p50"] > 0 for points in stages.values())


def test_the_cost_of_admission_is_measured_on_the_real_scheduler():
    _, scenario = next(iter(hostcost_admission.scenarios()))
    found = hostcost_admission.measure(scenario)
    assert found["steps"] > 1 and all(found[f"{name}_max_ms"] > 0 for name in ("accept", "schedule", "update"))


def test_times_between_sizes_are_interpolated_and_never_above_the_next_size():
    times = {1: 4.0, 16: 3.0, 64: 6.0}
    assert [Measured.at(times, n) for n in (0, 1, 8, 16, 40, 64, 128)] == [0.0, 3.0, 3.0, 3.0, 4.5, 6.0, 12.0]


def test_a_workload_is_played_to_its_last_token(costs):
    played = ceilings.play(costs, [100, 20], [5, 3], budget=64)
    assert played["steps"] == 2 + 4  # 120 tokens of prompts under a budget of 64; then the longer output's other four
    assert played["seconds"] == pytest.approx(sum(played["parts"].values()), abs=1e-3)
    assert ceilings.play(costs, [10] * 2000, [1] * 2000, budget=8192)["steps"] == 3  # 819, 819 and 362 prompts
    assert ceilings.play(costs, [1] * 1500, [1] * 1500, budget=8192)["steps"] == 2  # not more than 1024 rows


def test_attention_counts_every_pair_once(costs):
    assert ceilings._pairs(0, 4, 0) == 10 and ceilings._pairs(6, 4, 0) == 34
    assert ceilings._pairs(0, 4, 2) == 7
    one, two = costs.step([100], [], 1), costs.step([200], [], 1)
    assert two["attention"] == pytest.approx(2 * one["attention"])


def played(name, seed=0):
    """Seconds and prompts of a workload of prefixes, from an engine that answers with the number of its call."""
    calls = []

    def run(prompts, outputs):
        calls.append(prompts)
        return 1.0, [[len(calls)] * n for n in outputs]

    return offline.converse(run, workloads.PREFIX_WORKLOADS[name], 30_000, seed), calls


def test_every_turn_of_a_conversation_begins_with_all_that_was_said():
    (seconds, first), calls = played("conversations_64x8_300")
    assert (seconds, first) == (8.0, [])
    assert [{len(prompt) for prompt in prompts} for prompts in calls] == [{236 + 300 * turn} for turn in range(8)]
    for turn in range(1, 8):
        for before, now in zip(calls[turn - 1], calls[turn], strict=True):
            assert now[: len(before) + 64] == before + [turn] * 64
    assert len({tuple(prompt[:16]) for prompt in calls[0]}) == 64


def test_a_turn_of_a_conversation_alone_goes_on_behind_its_first_token():
    (seconds, first), calls = played("agent_5_140")
    assert (seconds, first) == (10.0, [1.0] * 5)
    for turn in range(5):
        (asked,), (going_on,) = calls[2 * turn : 2 * turn + 2]
        assert going_on == [*asked, 2 * turn + 1]
        if turn:
            assert asked[: 140 * turn] == calls[2 * turn - 1][0] + [2 * turn] * 11


def test_a_session_over_http_says_each_time_all_that_was_said(capsys):
    prompts = []

    class Server:
        def request(self, prompt, max_tokens):
            prompts.append(list(prompt))
            return max_tokens

        async def ask(self, max_tokens):
            answer, turn = Answer(1.0), len(prompts)
            answer.first, answer.end = 1.0 + turn, 1.0 + 2 * turn
            answer.token_ids, answer.cached_tokens = [turn] * max_tokens, 60 * (turn - 1)
            return answer

    args = argparse.Namespace(new=70, answer=30, vocab_size=500)
    turns = asyncio.run(agent_session.session(Server(), args, 3, 399))
    assert [len(prompt) for prompt in prompts] == [70, 170, 270]
    assert prompts[2][:200] == prompts[1] + [2] * 30 and prompts[1][:100] == prompts[0] + [1] * 30
    found = agent_session.summary(turns, args)
    assert (found["turns"], found["tokens"], found["ttft_ms_median"], found["ttft_ms_max"]) == (3, 300, 2500.0, 3000.0)
    assert (found["cached_of_prompts"], found["cached_of_said_before"]) == (round(180 / 440, 4), 0.6)
    assert capsys.readouterr().out.count("session 3, turn") == 3


def test_a_shared_prefix_is_shared_by_all_requests_of_a_run_and_by_no_other_run():
    _, (prompts,) = played("shared_prefix_2000_x512")
    assert len(prompts) == 512 and {len(prompt) for prompt in prompts} == {2064}
    assert {tuple(prompt[:2000]) for prompt in prompts} == {tuple(prompts[0][:2000])}
    assert len({tuple(prompt[2000:]) for prompt in prompts}) == 512
    _, (others,) = played("shared_prefix_2000_x512", seed=100)
    assert others[0][:16] != prompts[0][:16]


@pytest.mark.parametrize("name", workloads.PREFIX_WORKLOADS)
def test_a_workload_of_prefixes_has_the_lengths_that_its_figures_are_of(name):
    workload = workloads.PREFIX_WORKLOADS[name]
    _, calls = played(name)
    calls_of_turn = 2 if workload.conversations == 1 else 1  # the first token has a call of its own
    assert [len(prompt) for prompts in calls[::calls_of_turn] for prompt in prompts] == workload.input_lengths
    assert len(workload.output_lengths) == len(workload.input_lengths)


def test_memory_that_grew_is_told_from_memory_that_is_steady():
    samples = [{"at_s": t, "rss_mib": {"1 a": 100.0 + t, "2 b": 50.0 if t < 40 else 60.0}} for t in range(101)]
    found = soak.growth(samples, warm_up_s=40.0)
    assert found["2 b"]["growth"] == 0.0 and 50 < found["1 a"]["growth"] < 60


def test_metrics_are_read_under_either_prefix():
    text = 'quire:num_requests_running{model_name="m"} 3.0\nvllm:prompt_tokens_total{a="b"} 1e3\n# HELP quire:x y\n'
    assert soak.METRIC.findall(text) == [("num_requests_running", "3.0"), ("prompt_tokens", "1e3")]


def test_a_mix_holds_every_kind_of_request_within_the_context():
    mix = soak.Mix("m", 512, 300, seed=1)
    plans = [mix.draw() for _ in range(2000)]
    assert {p.kind for p in plans} == set(mix.kinds)
    for p in plans:
        if p.status == 200 and "prompt" in p.body:
            assert len(p.body["prompt"]) + p.body["max_tokens"] <= 512 and max(p.body["prompt"]) < 300


def test_a_mix_with_vectors_checks_their_answers():
    mix = soak.Mix("m", 512, 300, seed=1, vectors=True)
    plans = [mix.draw() for _ in range(500)]
    assert {"vectors", "ranking"} <= {plan.kind for plan in plans}
    for path in (soak_vectors.VECTORS, soak_vectors.RANKING):
        body = next(plan.body for plan in plans if plan.path == path)
        count = len(body.get("input") or body["documents"])
        good = {"data": [{"embedding": [0.6, 0.8]}] * count, "results": [{"index": i} for i in range(count)][::-1]}
        assert soak_vectors.problem(body, json.dumps(good).encode()) == ""
        fewer = {"data": good["data"][1:], "results": good["results"][1:]}
        assert soak_vectors.problem(body, json.dumps(fewer).encode())
    short = json.dumps({"data": [{"embedding": [0.6, 0.6]}]}).encode()
    assert "length 1" in soak_vectors.problem({"input": ["x"]}, short)


def result(engine, load, rate):
    points = {name: dict.fromkeys(("mean", "p50", "p90", "p99"), 1.5) for name in serve.LATENCIES}
    sizes = {"input_len": 1, "output_len": 2, "range_ratio": 0.0, "requests": 3, "failures": 0, "duration_s": 1.0}
    one = {"engine": engine, "load": load, "output_tok_s": rate, "total_tok_s": rate, "request_s": 1.0, **sizes, **points}
    return {"engine": engine, "health_s": 2.5, "loads": [one]}


def test_results_survive_the_way_through_csv_and_log_to_a_plot(tmp_path):
    table, log = tmp_path / "r.csv", tmp_path / "run.log"
    results = [result("quire", "closed:256", 10.0), result("vllm", "closed:256", 5.0), result("quire", "closed:8", 3.0)]
    serve.append_csv(table, "m", results[:1], {"gpu": "g"})
    serve.append_csv(table, "m", results[1:], {"gpu": "g"})
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 3
    log.write_text("noise\nRESULT " + json.dumps({"model": "a/m", "results": results}))
    for path in (table, log):
        engines = plot.curves(plot.read(path))["m"]
        assert [r["output_tok_s"] for r in engines["quire"]] == [3.0, 10.0] and engines["vllm"][0]["itl_ms_p99"] == 1.5
    log.write_text("noise")
    with pytest.raises(ValueError, match="RESULT"):
        plot.read(log)


def test_a_server_under_test_is_the_one_that_was_started(tmp_path):
    of_text = servers.Command.of_text
    assert (
        of_text("quire serve --port 8123", None, "m").url == of_text("x --port=8123", None, "m").url == "http://127.0.0.1:8123"
    )
    assert (
        of_text("quire serve", None, "m").url == "http://127.0.0.1:8000" and of_text("x", "http://h:1", "m").url == "http://h:1"
    )
    other = socket.create_server(("127.0.0.1", 0))
    command = of_text(f"a-server --port {other.getsockname()[1]}", None, "m")
    with other, pytest.raises(RuntimeError, match=r"listens at .* already"):
        servers.Server(command, tmp_path / "log")
    ends = of_text(f"{sys.executable} -c raise(SystemExit(3)) --port 1", None, "m")
    failure = pytest.raises(RuntimeError, match="ended with exit code 3 while it started")
    with servers.Server(ends, tmp_path / "new" / "log") as ended, failure:
        ended.wait_until_healthy(20.0)


def test_what_was_measured_before_a_run_is_cut_off_is_kept(tmp_path, monkeypatch, capsys):
    def cut_off(args, loads, options, results):
        results.append(result("quire", "closed:1", 5.0))
        raise SystemExit(143)

    monkeypatch.setattr(serve, "run", cut_off)
    monkeypatch.setattr(serve, "end_by_signal", lambda: None)
    monkeypatch.setattr(sys, "argv", ["serve.py", "--csv", str(tmp_path / "r.csv"), "--model", "m"])
    with pytest.raises(SystemExit):
        serve.main()
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 2 and "RESULT {" in capsys.readouterr().out


def test_the_cost_of_a_mask_is_measured():
    folder = Path("enginecore/loading/bundled")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    found = structured.measure_masks((folder / "tokenizer.json").read_bytes(), vocab_size, num_tokens=20)
    assert found["mask_us_mean"] > 0 and found["compile_ms"] > 0
    assert structured.schema(1) != structured.schema(2)
    assert len({str(structured.schema(3, titles)) for titles in structured.TITLES}) == len(structured.TITLES)


def test_acceptance_of_drafts_by_the_three_ways():
    rng = np.random.default_rng(3)
    target = rng.standard_normal((6, 700), np.float32) * 4
    of_target = acceptance.draws(target, 1.0, 40)
    p = acceptance.probabilities(target, 1.0)
    same = acceptance.acceptance(target, target, 1.0, of_target)
    assert same == pytest.approx({"shared": 1.0, "rejection": 1.0, "greedy": p.max(1).mean()})
    strange = acceptance.acceptance(target, np.roll(target, 7, axis=1), 1.0, of_target)
    assert strange["rejection"] == pytest.approx(np.minimum(p, np.roll(p, 7, axis=1)).sum(1).mean())
    assert strange["shared"] < 0.3 and strange["greedy"] < 0.1


def test_random_adapters_are_read_as_peft_writes_them(tmp_path):
    folder = Path("enginecore/loading/bundled")
    made = random_adapters.Adapters(tmp_path, folder, 8, distinct=2)
    names = [made.write(f"a{i}") for i in range(3)] + [made.write("activated", alora_invocation_tokens=[4, 5])]
    plans = [read_adapter(tmp_path / name, AdapterLimits()) for name in names]
    shapes = broken_adapters.shapes_of(folder)
    for plan in plans:
        assert {part.layer: (part.b.shape[0], part.a.shape[1]) for part in plan.parts} == shapes
    assert plans[3].invocation_tokens == (4, 5) and len({plan.file.inode for plan in plans}) == 2
    assert plans[2].file.inode == plans[0].file.inode and len({plan.file.folder for plan in plans}) == 4
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in names[:2])
    assert first != second and len(first) > made.megabytes * 1e6
