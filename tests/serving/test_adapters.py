"""LoRA adapters over HTTP: each answers with its own tokens, alone and together, and they come and go while the server runs."""

import contextlib
import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from peft_folders import write_adapter
from served import Served, request
from serving import EventStream, command_of, until

import quire.enginecore.loading.model_files

BUNDLED = Path(quire.enginecore.loading.model_files.__file__).parent / "bundled"
FLAGS = ("--device", "cpu", "--max-num-seqs", "8", "--cpu-kv-cache-gib", "0.2", "--enable-lora", "--max-loras", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for i in range(4):
        write_adapter(root / "dir" / f"a{i}", BUNDLED, seed=i, std=0.5)
    write_adapter(root / "start", BUNDLED, seed=9, std=0.5)
    return root


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    limits = tmp_path_factory.mktemp("limits") / "limits.yaml"
    limits.write_text("few:\n  models: [sql, 'a*']\n" + f"{_digest('one')}: few\n{_digest('boss')}:\n  admin: true\n")
    more = ("--lora-modules", f"sql={folder / 'start'}", "--lora-dirs", str(folder / "dir"), "--lora-on-demand")
    with Served(*FLAGS, *more, "--api-key", "one", "--api-key", "boss", "--limits", str(limits)) as served:
        yield served.url()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def ask(url, model, key="boss", **more):
    body = {"model": model, "prompt": "Once upon", "max_tokens": 8, "temperature": 0, **more}
    status, answer = request(url, "POST", "/v1/completions", body, key)
    return json.loads(answer)["choices"][0]["text"] if status == 200 else status


def stream(url, model, **more):
    host, _, port = url.removeprefix("http://").partition(":")
    body = {"model": model, "prompt": "Once upon", "temperature": 0, "stream": True, **more}
    return EventStream((host, int(port)), "/v1/completions", body)


def call(url, route, key="boss", **body):
    status, answer = request(url, "POST", f"/v1/{route}_lora_adapter", body, key)
    return status, answer.decode()


def test_each_adapter_answers_alone_as_it_does_beside_others(url):
    names = ["quire-tiny", "sql", "a0", "a1", "a2", "a3"]
    alone = {name: ask(url, name) for name in names}
    assert len(set(alone.values())) == len(names) and all(isinstance(text, str) for text in alone.values())
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda name: (name, ask(url, name)), names * 3))
    assert all(text == alone[name] for name, text in together)


def test_other_routes_take_adapters_too(url):
    chat = {"model": "sql", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    for route, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "sql", "input": "Hi", "max_output_tokens": 16}),
        ("/tokenize", {"model": "sql", "prompt": "Hi"}),
        ("/inference/v1/generate", {"model": "sql", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}),
        ("/api/chat", {"model": "sql", "messages": chat["messages"], "stream": False}),
    ):
        status, answer = request(url, "POST", route, body, "boss")
        assert status == 200, (route, answer)
        unknown = request(url, "POST", route, {**body, "model": "nope"}, "boss")
        assert unknown[0] == 404, (route, unknown)


def test_adapters_come_and_go(url, folder):
    path = str(folder / "dir" / "a1")
    assert call(url, "load", lora_name="new", lora_path=path) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert ask(url, "new") == ask(url, "a1")
    status, answer = call(url, "load", lora_name="new", lora_path=path)
    assert status == 400 and json.loads(answer)["error"]["type"] == "InvalidUserInput" and "already been loaded" in answer
    assert call(url, "load", lora_name="new", lora_path=str(folder / "dir" / "a2"), load_inplace=True)[0] == 200
    assert ask(url, "new") == ask(url, "a2")
    assert call(url, "unload", lora_name="new") == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert ask(url, "new") == 404
    status, answer = call(url, "unload", lora_name="new")
    assert status == 404 and json.loads(answer)["error"]["type"] == "NotFoundError"
    for body in ({"lora_name": "x"}, {"lora_path": path}, {"lora_name": "quire-tiny", "lora_path": path}):
        assert call(url, "load", **body)[0] == 400
    assert call(url, "load", lora_name="x", lora_path=str(folder / "start"))[0] == 400, "it is outside of --lora-dirs"
    assert call(url, "load", lora_name="x", lora_path=str(folder / "dir" / "none"))[0] == 404
    assert call(url, "load", "one", lora_name="x", lora_path=path)[0] == 403


def test_a_key_sees_and_names_its_own_models_only(url):
    def names(key):
        return {card["id"]: card for card in json.loads(request(url, "GET", "/v1/models", None, key)[1])["data"]}

    ask(url, "a0")
    boss, one = names("boss"), names("one")
    assert {"quire-tiny", "sql", "a0"} <= boss.keys() and "quire-tiny" not in one and {"sql", "a0"} <= one.keys()
    assert boss["sql"]["parent"] == "quire-tiny" and boss["sql"]["root"].endswith("/start") and one["sql"]["root"] == "sql"
    assert ask(url, "quire-tiny", "one") == 404 and isinstance(ask(url, "sql", "one"), str)
    assert request(url, "GET", "/v1/models/sql", None, "one")[0] == 200


def test_metrics_name_what_runs(url):
    stop = threading.Event()

    def keep_asking():
        while not stop.is_set():
            ask(url, "sql", max_tokens=200, ignore_eos=True)

    def seen():
        text = request(url, "GET", "/metrics", None, "boss")[1].decode()
        return 'max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""' in text and "quire:lora_loads_total" in text

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        until(seen)
    finally:
        stop.set()
        asking.join()


def test_a_bad_module_is_one_line_at_the_start(folder):
    write_adapter(folder / "bad", BUNDLED, use_dora=True)
    with Served(*FLAGS, "--lora-modules", f"x={folder / 'bad'}") as served:
        code, said = served.wait()
    assert code and said.strip().splitlines()[-1].endswith("use_dora is True, which is not supported")


def kill(served, module):
    """Kill the server's processes of this module."""
    for process in psutil.Process(served.process.pid).children(recursive=True):
        if module in command_of(process):
            process.kill()


@pytest.mark.slow
def test_adapters_outlive_workers_and_engines(folder):
    """Those that were loaded while the server ran come back, and requests that ran go on with theirs."""
    with Served(*FLAGS, "--lora-dirs", str(folder / "dir")) as served:
        url = served.url()
        for name in ("x", "y", "z"):
            assert call(url, "load", lora_name=name, lora_path=str(folder / "dir" / f"a{'xyz'.index(name)}"))[0] == 200
        expected = {name: ask(url, name, max_tokens=200) for name in ("x", "y", "z", "quire-tiny")}
        for module in ("quire.workers", "quire.enginecore"):
            with contextlib.ExitStack() as open_streams:
                streams = {name: open_streams.enter_context(stream(url, name, max_tokens=200)) for name in expected}
                begun = {name: stream.wait_for_text() for name, stream in streams.items()}
                kill(served, module)
                assert {name: begun[name] + stream.text() for name, stream in streams.items()} == expected, module
        listed = json.loads(request(url, "GET", "/v1/models")[1])["data"]
        assert {"x", "y", "z"} <= {card["id"] for card in listed}


@pytest.mark.slow
def test_replicas_have_the_same_adapters(folder):
    with Served(*FLAGS, "--data-parallel-size", "2", "--lora-dirs", str(folder / "dir")) as served:
        url = served.url()
        assert call(url, "load", lora_name="x", lora_path=str(folder / "dir" / "a1"))[0] == 200
        assert call(url, "load", lora_name="y", lora_path=str(folder / "dir" / "none"))[0] == 404
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(lambda _: ask(url, "x"), range(16)))) == 1
        assert ask(url, "y") == 404
        assert call(url, "unload", lora_name="x")[0] == 200 and ask(url, "x") == 404
