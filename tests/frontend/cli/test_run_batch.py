"""quire run-batch: every line answered once, however often it is interrupted, and nothing else's file touched."""

import asyncio
import collections
import contextlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S
from fake_core import FakeCore
from http_servers import answering, url_of
from served import ROOMY, say_hi
from serving import until

from quire.frontend.cli import main as cli
from quire.frontend.cli.answers_file import AnswersFile, BatchFileError
from quire.frontend.cli.batch_job import Job, _opened, _run_beside
from quire.frontend.cli.engines import Engines
from quire.frontend.http.api.output_plan import ParserNames
from quire.frontend.http.batches.input_file import InputFile
from quire.frontend.http.batches.lines import answer_line, error_line

COMMAND = [sys.executable, "-P", "-m", "quire.frontend.cli.main", "run-batch"]
SMALL = ["--device", "cpu", "--max-num-seqs", "8", "--cpu-kv-cache-gib", "0.05", "--max-model-len", "256"]


def line(custom_id, **body) -> str:
    body = {"prompt": "hi", "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def write_input(path, *lines) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def answers(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run_here(core: FakeCore, input_name: str, output_name: str) -> Job:
    with _opened(input_name) as file:
        job = Job(InputFile(file.fileno()), AnswersFile(output_name))
        job.refuse_bad_lines()
        asyncio.run(_run_beside(job, Engines(None, [core.address]), ParserNames()))
        job.answers.close()
    return job


# --------------------------------------------------------------------------------------------------------------- a job
def test_every_line_is_answered_once_and_bad_ones_are_said_so(tmp_path):
    out = tmp_path / "out.jsonl"
    ids = [f"r{i}" for i in range(40)]
    bad = ["{", line("r1"), line("s", stream=True), json.dumps({"custom_id": "u", "method": "POST", "url": "/x", "body": {}})]
    name = write_input(tmp_path / "in.jsonl", *map(line, ids[:20]), "", *bad, *map(line, ids[20:]), line("t", temperature=-1))
    with FakeCore(say_hi, limits=ROOMY) as core:
        job = run_here(core, name, str(out))
        assert not job.todo and job.answers.num_failed == 5
        found = answers(out)
        refused = {a["error"]["line"]: a for a in found if a["error"]}
        assert {number: a["custom_id"] for number, a in refused.items()} == {22: None, 23: "r1", 24: "s", 25: "u"}
        assert refused[22]["error"]["message"] == "line 22: this line is not valid JSON."
        status = {a["custom_id"]: a["response"]["status_code"] for a in found if a["response"]}
        assert status == {**dict.fromkeys(ids, 200), "t": 400}
        assert found[-1]["response"]["body"]["object"] == "text_completion" or found[-1]["custom_id"] == "t"
        before = out.read_bytes()
        again = run_here(core, name, str(out))
        assert out.read_bytes() == before and again.answers.num_failed == 5
        assert "0 requests answered" in again.summary("out") and "45 before" in again.summary("out")


def test_lines_for_all_routes_in_one_file(tmp_path):
    bodies = {
        "/v1/responses": {"input": "hi", "max_output_tokens": 4},
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
        "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    }
    lines = [
        json.dumps({"custom_id": f"{url} {i}", "method": "POST", "url": url, "body": body})
        for i in range(3)
        for url, body in bodies.items()
    ]
    lines.append(json.dumps({"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": {"background": True}}))
    out = tmp_path / "out.jsonl"
    with FakeCore(say_hi, limits=ROOMY) as core:
        job = run_here(core, write_input(tmp_path / "in.jsonl", *lines), str(out))
    assert not job.todo and job.answers.num_failed == 1
    found = {a["custom_id"]: a for a in answers(out)}
    assert found.pop("b")["error"]["code"] == "invalid_value"
    assert len(found) == 9 and all(a["response"]["status_code"] == 200 for a in found.values())
    response, tokens = (found[f"{url} 0"]["response"]["body"] for url in list(bodies)[:2])
    assert response["object"] == "response" and response["status"] != "failed" and response["output"][0]["content"]
    assert tokens["choices"][0]["token_ids"] and tokens["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_file_that_is_cut_anywhere_is_taken_up(tmp_path):
    lines = [answer_line(f"r{i}", "batch_req_1", 200 if i else 400, b'{"a":"\\n"}') for i in range(3)] + [
        error_line(None, "c", "m", 7)
    ]
    whole = b"".join(each + b"\n" for each in lines)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    path = tmp_path / "out.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        file = AnswersFile(str(path))
        kept = sum(end <= cut for end in ends)
        assert file.answered == {f"r{i}" for i in range(min(kept, 3))} and file.refused == ({7} if kept == 4 else set())
        assert file.num_failed == (kept > 0) + (kept == 4)
        file.write(b"{}")
        file.close()
        assert path.read_bytes() == whole[: ([0, *ends])[kept]] + b"{}\n"


def test_other_files_are_left_alone(tmp_path):
    path = tmp_path / "precious"
    for content in ("my thesis", "my thesis\n", '{"custom_id": "a"}\n', line("a") + "\n", '{"id": 5', "[]\n"):
        path.write_text(content)
        with pytest.raises(BatchFileError, match=r"another file|no file of a batch"):
            AnswersFile(str(path))
        assert path.read_text() == content
    path.write_bytes(b"")
    first = AnswersFile(str(path))
    with pytest.raises(BatchFileError, match="another run-batch"):
        AnswersFile(str(path))
    first.close()
    with pytest.raises(BatchFileError, match="Is a directory"):
        AnswersFile(str(tmp_path))


def test_an_input_from_a_url(tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/in" else 404)
            self.end_headers()
            self.wfile.write(line("a").encode())

        def log_message(self, *_: object) -> None:
            return

    with answering(http.server.HTTPServer(("127.0.0.1", 0), Handler)) as server:
        url = url_of(server)
        with _opened(f"{url}/in") as file:
            assert InputFile(os.dup(file.fileno())).read(1).custom_id == "a"
        with pytest.raises(BatchFileError, match="404"):
            _opened(f"{url}/x")
    with pytest.raises(BatchFileError, match="No such file"):
        _opened(str(tmp_path / "nothing"))


def test_wrong_starts_say_why(tmp_path):
    name, out = write_input(tmp_path / "in", line("a")), str(tmp_path / "out")
    for arguments, text in [
        (["-i", name], "-o"),
        (["-i", name, "-o", name], "the same file"),
        (["-i", name, "-o", "https://x/y"], "not supported"),
        (["-i", str(tmp_path / "no"), "-o", out], "No such file"),
        (["-i", name, "-o", out, "m", "--model", "m"], "given twice"),
        (["-i", name, "-o", out, "--block-size", "3"], "--block-size"),
        (["-i", name, "-o", out, "--enable-mm-embeds"], "--enable-mm-embeds is not supported"),
        (["-i", name, "-o", "/proc/x/y"], "/proc/x/y: No such file"),
    ]:
        err = io.StringIO()
        with contextlib.redirect_stderr(err), pytest.raises(SystemExit, match="2"):
            cli.main(["run-batch", *arguments])
        assert text in err.getvalue() and err.getvalue().count("\n") == 1, err.getvalue()
    assert not os.path.exists(out)


def test_an_input_without_work_needs_no_engine(tmp_path, capsys):
    name, out = write_input(tmp_path / "in", "", "{"), tmp_path / "out"
    assert cli.main(["run-batch", "-i", name, "-o", str(out), "--model", "/there/is/none"]) == 1
    assert len(answers(out)) == 1 and "; 1 failed" in capsys.readouterr().err
    name = write_input(tmp_path / "empty", "")
    assert cli.main(["run-batch", "-i", name, "-o", str(tmp_path / "out2"), "--enable-auto-tool-choice"]) == 0
    assert "nothing is needed here for --enable-auto-tool-choice" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- the whole command
def test_from_standard_input_to_standard_output():
    lines = [line("a", prompt="Once upon a time", temperature=0), line("b", model="another")]
    command = [*COMMAND, "-i", "-", "-o", "-", *SMALL, "--served-model-name", "tiny"]
    run = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=DEADLINE_S)
    found = {a["custom_id"]: a["response"] for a in map(json.loads, run.stdout.splitlines())}
    assert run.returncode == 1, run.stderr
    assert found["a"]["status_code"] == 200 and found["a"]["body"]["model"] == "tiny"
    assert found["b"]["status_code"] == 404 and "2 requests answered" in run.stderr


@pytest.mark.slow
def test_it_goes_on_from_where_it_was_stopped(tmp_path):
    count, out = 400, tmp_path / "out.jsonl"
    name = write_input(
        tmp_path / "in.jsonl", *(line(f"r{i}", prompt=f"count {i}", max_tokens=30, ignore_eos=True) for i in range(count))
    )
    out.touch()

    def num_lines() -> int:
        return out.read_bytes().count(b"\n")

    for number, code in [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130), (None, 0)]:
        before = num_lines()
        with subprocess.Popen([*COMMAND, "-i", name, "-o", str(out), *SMALL], stderr=subprocess.PIPE, text=True) as process:
            if number is not None:
                until(lambda before=before: num_lines() > before + 20)
                process.send_signal(number)
            _, err = process.communicate(timeout=2 * DEADLINE_S)
        assert process.returncode == code, err
        if number == signal.SIGKILL:
            with out.open("ab") as file:
                file.write(b'{"id":"batch_req_torn')
        elif number is not None:
            assert "the same command goes on with them" in err
    counts = collections.Counter(a["custom_id"] for a in answers(out))
    assert len(counts) == count and set(counts.values()) == {1}


@pytest.mark.slow
def test_it_outlives_its_engine(tmp_path):
    import psutil

    out = tmp_path / "out.jsonl"
    name = write_input(
        tmp_path / "in.jsonl", *(line(f"r{i}", prompt=f"count {i}", max_tokens=30, ignore_eos=True) for i in range(150))
    )
    out.touch()
    with subprocess.Popen([*COMMAND, "-i", name, "-o", str(out), *SMALL], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: out.read_bytes().count(b"\n") > 20)
        (engine,) = psutil.Process(process.pid).children()
        engine.kill()
        _, err = process.communicate(timeout=2 * DEADLINE_S)
    assert process.returncode == 0 and "the engine is back" in err, err
    assert len({a["custom_id"] for a in answers(out)}) == 150 == len(answers(out))
