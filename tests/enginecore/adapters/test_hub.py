"""Adapters from the hub: two files of a repository of an owner that the operator names, and a clear error for all else."""

import shutil
import threading

import msgspec
import pytest
from adapter_core import Core, expected
from adapter_folders import write_folder
from core_by_hand import EPOCH
from fake_hub import COMMIT, FakeHub, hub_environment
from http_servers import answering

from quire.enginecore.adapters.hub import Hub
from quire.enginecore.adapters.start import read_modules
from quire.ipc.adapters import AdapterError
from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import Utility, UtilityResult
from quire.ipc.messages.utilities import AdaptersRestored, LoadFolder, RestoreAdapters, UnloadAdapter

FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "repository")
    for name in ("README.md", "adapter_model.bin", "training_args.bin", "tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    with answering(FakeHub(folder, "owner/sql")) as server:
        server.files["additional_chat_templates/x.jinja"] = server.files["checkpoint-1/adapter_config.json"] = b"{}"
        environment = hub_environment(server, tmp_path / "home")
        for name in ("HF_ENDPOINT", "HF_HOME", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
            monkeypatch.setenv(name, environment[name])
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def core(tmp_path, hub):
    (tmp_path / "dirs").mkdir()
    made = Core(tmp_path / "dirs")
    made.adapters.begin_with({}, Hub(("owner", "other"), str(tmp_path / "cache"), "hf_secret"))
    yield made
    made.close()


def test_a_load_downloads_the_two_files_and_nothing_else(core, hub, tmp_path):
    info = core.load("sql", "owner/sql")
    assert sorted(hub.downloaded) == FILES and "Bearer hf_secret" in hub.tokens
    assert info.file.folder == str(tmp_path / "cache" / "models--owner--sql" / "snapshots" / COMMIT)
    assert core.run(1, "sql") == expected(1)
    core.load("sql", "owner/sql", in_place=True)
    assert sorted(hub.downloaded) == FILES, "they are cached"


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("owner/none", "not_found", "sql: owner/none is neither a local folder nor an adapter on the hub"),
        ("other/none", "not_found", "neither a local folder"),
        ("stranger/sql", "invalid", "--lora-hub does not name the owner 'stranger'"),
        ("owner/sql/more", "invalid", "does not lie in one of --lora-dirs"),
        ("../owner/sql", "invalid", "does not lie in one of --lora-dirs"),
        ("owner--x/sql", "invalid", "does not lie in one of --lora-dirs"),
    ],
)
def test_what_cannot_be_downloaded_is_said(core, hub, path, code, said):
    answer = core.ask(LoadFolder("sql", path))
    assert answer.code == code and said.removeprefix("sql: ") in answer.message
    assert not hub.downloaded and not len(core.adapters.registry)


def test_a_path_with_a_typing_error_is_not_looked_for_on_the_hub(core, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "dirs")
    (tmp_path / "dirs" / "adapters").mkdir()
    for owners, said in (("*",), "'adapters' is a folder here"), (("*", "adapters"), "nor an adapter on the hub"):
        assert not hub.tokens
        core.adapters.begin_with({}, Hub(owners, str(tmp_path / "cache"), "hf_secret"))
        answer = core.ask(LoadFolder("sql", "adapters/sqll"))
        assert answer.code == "not_found" and said in answer.message


def test_a_repository_without_an_adapter_is_refused_by_the_file_that_it_lacks(core, hub):
    del hub.files["adapter_model.safetensors"]
    answer = core.ask(LoadFolder("sql", "owner/sql"))
    assert (answer.code, answer.message) == ("invalid", "sql: the repository owner/sql has no adapter_model.safetensors")


class SlowHub(Hub):
    """It downloads after it was told to."""

    asked, goes_on = threading.Event(), threading.Event()

    def download(self, repository: str) -> str:
        self.asked.set()
        assert self.goes_on.wait(60)
        return super().download(repository)


def test_a_download_holds_up_no_other_load(core, hub, tmp_path):
    slow = SlowHub(("owner",), str(tmp_path / "cache"))
    core.adapters.begin_with({}, slow)
    core.asker.send(Utility(EPOCH, 1000, LoadFolder("sql", "owner/sql")))
    core.until(slow.asked.is_set)
    core.load("folder", write_folder(tmp_path / "dirs" / "a"))
    slow.goes_on.set()
    assert core.answer(core.asker, UtilityResult).answer.adapter.name == "sql"


def test_an_unexpected_error_ends_one_download_and_not_those_behind_it(core, hub, tmp_path):
    class BrokenHub(Hub):
        def download(self, repository: str) -> str:
            if repository == "owner/broken":
                raise msgspec.DecodeError("the answer is cut off")
            return super().download(repository)

    core.adapters.begin_with({}, BrokenHub(("owner",), str(tmp_path / "cache")))
    answer = core.ask(LoadFolder("broken", "owner/broken"))
    assert (answer.code, answer.message) == ("invalid", "broken: owner/broken cannot be downloaded: DecodeError")
    assert core.load("sql", "owner/sql").name == "sql"


def test_a_download_that_stalls_ends_and_lets_the_next_one_go_on(core, hub, tmp_path):
    hub.stalled = "owner/stalled"
    bounded = Hub(("owner",), str(tmp_path / "cache"), most_s=3.0)
    core.adapters.begin_with({}, bounded)
    answer = core.ask(LoadFolder("stalled", "owner/stalled"))
    assert (answer.code, answer.message) == ("invalid", "stalled: owner/stalled cannot be downloaded: it takes more than 3 s")
    bounded.most_s = 60.0
    assert core.load("sql", "owner/sql").name == "sql"
    hub.goes_on.set()


@pytest.mark.parametrize("owners", ["owner", "*"])
def test_a_downloaded_adapter_is_restored_from_the_cache(core, hub, tmp_path, owners):
    core.adapters.begin_with({}, Hub((owners,), str(tmp_path / "cache")))
    info = core.load("sql", "owner/sql")
    core.ask(UnloadAdapter("sql"))
    core.until(lambda: core.workers.forgotten)
    hub.files.clear()
    assert core.ask(RestoreAdapters([info])) == AdaptersRestored([])
    assert core.adapters.registry.get("sql").info == info


def test_at_the_start_any_owner_may_be_named(hub, tmp_path):
    config = EngineConfig(enable_lora=True, lora_modules=["sql=owner/sql"], download_dir=str(tmp_path / "cache"))
    limits, start = read_modules(config)
    assert start.plans["sql"].file.folder.endswith(COMMIT) and not limits.has_hub and sorted(hub.downloaded) == FILES
    with pytest.raises(AdapterError, match="--lora-modules sql: owner/none is neither a local folder nor an adapter"):
        read_modules(EngineConfig(enable_lora=True, lora_modules=["sql=owner/none"]))
    shutil.rmtree(tmp_path / "cache")
    limits, _ = read_modules(EngineConfig(enable_lora=True, lora_hub=["owner"]))
    assert limits.has_hub and limits.captures


def test_a_gated_repository_says_what_to_do(core, hub):
    hub.files["x"] = b""
    answer = core.ask(LoadFolder("sql", "owner/gated"))
    assert answer.code == "invalid" and "owner/gated is gated: accept its terms" in answer.message
