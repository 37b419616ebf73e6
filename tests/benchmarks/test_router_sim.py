"""benchmarks/router_sim.py on small inputs: its shape, and traces that are no traces."""

import json

import pytest
import router_sim


def trace_line(**fields) -> str:
    return json.dumps({"timestamp": 10, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2], **fields})


def test_a_simulated_router_finds_conversations_again(capsys):
    words = ["--replicas", "20", "--requests", "1500", "--tenants", "60", "--index-blocks", "100000", "--frontends", "2"]
    assert router_sim.main(words) == 0
    found = json.loads(capsys.readouterr().out.rpartition("RESULT ")[2])
    aware, in_turn = found["cache-aware"], found["round-robin"]
    assert in_turn["hits"] < aware["hits"] <= found["unbounded_hits"] and aware["hits"] > 0.8 * found["unbounded_hits"]
    assert found["unbounded"]["ttft_ms"][0] <= aware["ttft_ms"][0] < in_turn["ttft_ms"][0]
    assert found["pooled"]["hits"] <= found["unbounded"]["hits"] == found["unbounded_hits"]


def test_a_trace_is_played(tmp_path, capsys):
    lines = [trace_line(timestamp=t, hash_ids=[t % 3, 7, 8 + t], extra=1) for t in range(20, 0, -1)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*lines, ""]))
    assert (
        router_sim.main(["--trace", str(path), "--replicas", "3", "--policies", "cache-aware", "--index-blocks", "1000"]) == 0
    )
    assert 0 < json.loads(capsys.readouterr().out.rpartition("RESULT ")[2])["cache-aware"]["hits"] < 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"timestamp": 1}', "input_length"),
        (trace_line(input_length="x"), "input_length"),
        (trace_line(input_length=0), "input_length"),
        (trace_line(input_length=1 << 40), "input_length"),
        (trace_line(output_length=-1), "output_length"),
        (trace_line(timestamp=-1), "timestamp"),
        (trace_line(hash_ids=[1, 2]), ""),
        (trace_line(hash_ids=[1]), "2 or 3 hash_ids, not 1"),
        (trace_line(hash_ids=[1, 2, 3, 4]), "2 or 3 hash_ids, not 4"),
        (trace_line(hash_ids=[1, -2, 3]), "hash_ids"),
        (trace_line(hash_ids=[1, 1 << 70, 3]), "hash_ids"),
        (trace_line(hash_ids=[1, 2.5, 3]), "hash_ids"),
        ("[" * 100_000, "line 3"),
        ("\udcff", "line 3"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named_by_its_number(tmp_path, capsys, line, why):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{trace_line()}\n\n{line}\n{trace_line()}\n".encode(errors="surrogateescape"))
    words = ["--trace", str(path), "--replicas", "2", "--policies", "round-robin", "--index-blocks", "1000"]
    assert router_sim.main(words) == (1 if why else 0)
    said = capsys.readouterr().err
    assert (f"{path}, line 3: " in said and why in said) if why else said == ""


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_trace_without_requests_is_said_to_be_one(tmp_path, capsys, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert router_sim.main(["--trace", str(path)]) == 1 and "no request" in capsys.readouterr().err
    assert router_sim.main(["--trace", str(tmp_path / "nowhere")]) == 1


@pytest.mark.parametrize("words", ["--turns 0.5", "--seed -1", "--zipf nan", "--decision --decisions 64"])
def test_options_that_cannot_be_are_refused(capsys, words):
    with pytest.raises(SystemExit):
        router_sim.main([*words.split(), "--replicas", "2", "--requests", "50"])
    assert "must be at least 1" in capsys.readouterr().err


def test_what_gives_no_requests_says_so(tmp_path, capsys):
    assert router_sim.main(["--replicas", "2", "--requests", "50", "--max-model-len", "5"]) == 1
    assert "longer than --max-model-len" in capsys.readouterr().err
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_line())
    assert router_sim.main(["--trace", str(path), "--speed", "1e-320"]) == 1
    assert "line 1: timestamp divided by --speed" in capsys.readouterr().err


def test_decisions_are_timed(capsys):
    words = ["--decision", "--replicas", "10", "--decisions", "80", "--index-blocks", "2000"]
    assert router_sim.main(words) == 0
    assert json.loads(capsys.readouterr().out.rpartition("RESULT ")[2])["decision_us"][1] > 0
