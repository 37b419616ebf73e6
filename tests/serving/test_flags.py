"""The engine's flags do what they say, as far as it shows on a CPU; and a start that cannot be says why in a line, and ends."""

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import inline_engine
import psutil
import pytest
from serving import SMALL, Daemon, Launched, Served, until
from tiny_models import tiny_model

from quire.ipc.sampling import SamplingParams
from quire.ipc.version import VERSION
from quire.workers.loading.weights import dummy_weights

pytestmark = pytest.mark.slow

ALL_FLAGS = {
    "--served-model-name": ["first", "second"], "--generation-config": ["vllm"], "--device": ["cpu"], "--dtype": ["float32"],
    "--load-format": ["dummy"], "--max-model-len": ["200"], "--gpu-memory-utilization": ["0.5"], "--cpu-kv-cache-gib": ["0.01"],
    "--num-gpu-blocks-override": ["100"], "--block-size": ["32"], "--max-num-seqs": ["4"], "--max-num-batched-tokens": ["64"],
    "--max-num-waiting": ["2"], "--no-enable-prefix-caching": [], "--scheduling-policy": ["priority"],
    "--admission": ["lookahead"], "--enforce-eager": [], "--max-logprobs": ["3"], "--seed": ["5"],
    "--tensor-parallel-size": ["1"], "--pipeline-parallel-size": ["1"], "--step-timeout-s": ["30"], "--enable-log-requests": [],
    "--long-prefill-token-threshold": ["16"], "--log-level": ["info"], "--log-format": ["text"],
    "--kv-cache-memory-bytes": ["1G"], "--hf-overrides": ['{"rms_norm_eps": 1e-6}'],
    "--override-generation-config": ['{"top_k": 50}'],
    "--chat-template-content-format": ["string"], "--chat-template": ["{% for m in messages %}<{{ m.content }}>{% endfor %}"],
}  # fmt: skip
PROMPT = list(range(10, 74))  # two blocks of 32 tokens


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With every flag that a local model on a CPU can have."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model("llama") / name, tokenizer)
    words = [word for flag, values in ALL_FLAGS.items() for word in (flag, *values)]
    with Served(str(tiny_model("llama")), "--tokenizer", str(tokenizer), *words) as served:
        yield served.ready()
        assert served.end() == 0


def test_every_flag_of_the_engine_is_known_to_both_commands() -> None:
    with Launched("quire.enginecore.cli", "--help") as daemon, Launched("quire.frontend.cli.main", "serve", "--help") as serve:
        assert daemon.wait() == serve.wait() == 0
    rest = {
        "--revision",
        "--download-dir",
        "--tokenizer",
        "--tokenizer-revision",
        "--hf-token",
        "-tp",
        "--disable-log-stats",
        "--enable-prefix-caching",
    }
    for flag in {*ALL_FLAGS, *rest}:
        assert all(re.search(rf"{flag}\b", said) for said in (daemon.output, serve.output)), flag
    for said in (daemon.output, serve.output):
        for entry in re.split(r"\n  (?=-)", said.partition("\noptions:")[2])[2:]:  # what takes a value says its default
            flag, takes_value = re.match(r"(--[-\w]+)( [A-Z{])?", entry).groups()
            assert not takes_value or flag == "--listen" or "(default: " in " ".join(entry.split()), entry
    assert "tcp://host:port (beyond this host only with keys)" in " ".join(daemon.output.split())


def test_versions() -> None:
    with Launched("quire.enginecore.cli", "--version") as daemon, Launched("quire.frontend.cli.main", "--version") as quire:
        assert daemon.wait() == quire.wait() == 0
    assert (daemon.lines, quire.lines) == ([f"enginecore {VERSION}"], [f"quire {VERSION}"])


def test_names_and_lengths(flagged: Served) -> None:
    models = flagged.ask("GET", "/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["first", "second"] and {m["max_model_len"] for m in models} == {200}
    assert flagged.complete(PROMPT, model="second")["model"] == "second"
    assert flagged.ask("POST", "/v1/completions", {"model": "third", "prompt": "a"}).status == 404
    answer = flagged.ask("POST", "/v1/completions", {"prompt": PROMPT * 4})
    assert answer.status == 400 and "200" in answer.error["message"]
    assert flagged.ask("POST", "/v1/completions", {"prompt": PROMPT, "logprobs": 4}).status == 400
    assert flagged.complete(PROMPT, logprobs=3)["choices"][0]["logprobs"]
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    tokenized = flagged.ask("POST", "/tokenize", {**chat, "return_token_strs": True}).json()
    assert "".join(tokenized["token_strs"]) == "<abc>"


def test_without_prefix_caching_nothing_is_found(flagged: Served) -> None:
    for _ in range(2):
        assert flagged.complete(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    until(lambda: flagged.metric("prompt_tokens_total") >= 2 * len(PROMPT))
    assert flagged.metric("prefix_cache_hits_total") == 0


def test_requests_are_logged_without_their_texts(flagged: Served) -> None:
    secrets = {"prompt": "confidential", "stop": ["clandestine"], "bad_words": ["hush"]}
    name = flagged.complete(**secrets, max_tokens=7, user="private")["id"]
    line = flagged.line(rf"request {name}: \d+ prompt tokens, max_tokens=7\b")[0]
    flagged.line(rf"request {name}: length, \d+ prompt tokens, 7 output tokens, \d")
    assert flagged.output.count(f"request {name}") == 2 and not re.search(r"request \d+:", flagged.output)
    for text in ("confidential", "clandestine", "hush", "private"):
        assert text not in flagged.output, line


def test_more_than_may_wait_is_told_to_come_again(flagged: Served) -> None:
    with ExitStack() as streams:
        answers = [flagged.stream([20 + i, 21], max_tokens=190, min_tokens=190) for i in range(4)]
        for stream in answers:
            streams.enter_context(stream).wait_for_text()
        answer = flagged.ask("POST", "/v1/completions", {"prompt": [[5], [6]], "n": 2})
        assert answer.status == 503 and answer.error["code"] == "overloaded" and int(answer.headers["retry-after"]) > 0
    until(lambda: flagged.metric("num_requests_running") == 0)


def test_dummy_weights_come_from_the_seed(flagged: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_engine, "dummy_weights", lambda model, _: dummy_weights(model, 5))
    engine = inline_engine.InlineEngine(tiny_model("llama"), block_size=32, dummy=True)
    (expected,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    answer = flagged.complete(PROMPT, max_tokens=16, ignore_eos=True, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize(("dtype", "block_size"), [("bfloat16", 16), ("float16", 256)])
def test_other_dtypes_and_block_sizes_serve(dtype: str, block_size: int) -> None:
    flags = (*SMALL, "--dtype", dtype, "--block-size", str(block_size), "--max-model-len", "600")
    with Served(*flags) as served:
        served.line(f"CPU, {dtype}")
        prompt = "One day a little dog went to the park with his friend. " * 24
        first, second = (served.complete(prompt, max_tokens=16) for _ in range(2))
        text = first["choices"][0]["text"]
        assert len(text.split()) > 5 and text.isascii()
        found = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found > 0 and found % block_size == 0
        assert served.end() == 0


# ------------------------------------------------------------------------------------------------ starts that cannot be
def broken(tmp_path: Path, name: str) -> Path:
    """A copy of a model to break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / name))


def edit_config(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


def test_what_cannot_start_says_why_in_a_line_and_ends(tmp_path: Path) -> None:
    no_tokenizer, cut, rope = (broken(tmp_path, f"model-{i}") for i in range(3))
    for file in no_tokenizer.glob("tokenizer*"):
        file.unlink()
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    edit_config(rope, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    cases: list[tuple[list[str], str]] = [
        ([f"{tmp_path}/nowhere"], "neither a folder nor a hub id"),
        (["nobody/nothing"], "nobody/nothing is not .* in the local cache"),
        ([str(no_tokenizer)], "no tokenizer.json"),
        ([str(cut)], "model.safetensors"),
        ([str(rope)], "dynamic"),
        (["--device", "cuda"], "--device cuda"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    for i in range(0, len(cases), 3):
        with ExitStack() as stack:
            starts = [stack.enter_context(Served(*words, env=offline)) for words, _ in cases[i : i + 3]]
            for start, (words, reason) in zip(starts, cases[i : i + 3], strict=True):
                assert start.wait() == 1, words
                assert re.match(f"quire serve: .*{reason}", start.lines[-1]), start.output
                assert "Traceback" not in start.output, start.output
                assert len([line for line in start.lines if not line[:2].isdecimal()]) == 1, start.output


def test_a_daemon_that_cannot_start_says_why_too(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    with Daemon(address, f"{tmp_path}/nowhere") as lost, Daemon("tcp://0.0.0.0:0", *SMALL) as open_to_all:
        assert lost.wait() == 1 and re.match("enginecore: .*neither a folder nor a hub id", lost.lines[-1])
        assert open_to_all.wait() == 1 and re.match("enginecore: .*--curve-secret-key-file", open_to_all.lines[-1])
    with Daemon(address, *SMALL) as first:
        until((tmp_path / "engine.sock").exists)  # it has the address before it has the model
        with Daemon(address, *SMALL) as second:
            assert second.wait() == 1 and "another process listens there" in second.lines[-1]
        assert first.ready().end() == 0
    with Served("--block-size", "17") as odd:
        assert odd.wait() == 2 and "--block-size must be 16, 32, 64, 128 or 256" in odd.lines[-1]


def test_a_stop_while_the_model_loads_leaves_nothing() -> None:
    with TemporaryDirectory(dir="/tmp") as folder:  # a longer path would not do for sockets
        private, socket_path = Path(folder) / "run", Path(folder) / "engine.sock"
        private.mkdir()
        env = {"XDG_RUNTIME_DIR": str(private)}
        with Daemon(f"ipc://{socket_path}", *SMALL, env=env) as daemon:
            until(socket_path.exists)
            assert daemon.end(signal.SIGINT) == 0
        with Served(*SMALL, env=env) as served:
            until(lambda: list(private.glob("*/engine/engine.sock")))
            assert served.end(signal.SIGTERM) == 0
        assert daemon.lines == ["enginecore: stopped while it was starting"] and served.lines == []
        assert list(private.iterdir()) == [] and not socket_path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stop_as_soon_as_there_is_a_worker_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """It is begun before its engine has loaded its own modules, let alone a model."""
    with Daemon(f"ipc://{tmp_path}/engine.sock", *SMALL) as daemon:
        until(lambda: daemon.pids("quire.workers"))
        worker = psutil.Process(daemon.pid_of("quire.workers"))
        daemon.end(number)
        until(lambda: not worker.is_running())
    assert not any("Traceback" in line for line in daemon.lines)


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Served("--port", port) as served:
            assert served.wait() == 1
            assert served.lines == [f"quire serve: port {port} of 127.0.0.1 is in use; choose another with --port"]


def test_overrides_reach_the_engine_and_its_worker(tmp_path: Path) -> None:
    """Of config.json: half of the layers; of generation_config.json: greedy, and an end after six tokens."""
    flags = ("--override-generation-config.max_new_tokens=6", "--override_generation_config.temperature", "0")
    with Served(
        *SMALL, "--hf-overrides", '{"num_hidden_layers": 2}', *flags, "--load-format=dummy", "--log-format=json"
    ) as served:
        served.ready()
        weights = served.line(r"weights (\d\.\d+) GiB")[1]
        answers = [served.complete("One day", max_tokens=None)["choices"][0]["text"] for _ in range(2)]
        assert answers[0] == answers[1]
        usage = served.complete("One day", max_tokens=None)["usage"]
        assert usage["completion_tokens"] <= 6
        assert served.end() == 0
        said = [json.loads(line)["message"] for line in served.output.splitlines()]  # not one of them is anything else
        assert any("KV cache" in message for message in said) and float(weights) < 0.03
    with Served(*SMALL, "--hf-overrides", '{"num_hidden_layers": 0}') as wrong:
        assert wrong.wait() == 1
        assert "num_hidden_layers" in wrong.output
