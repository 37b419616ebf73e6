"""The model's files at launch: folders, hub downloads (from a local server), summaries, files for frontends, conversions."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_models
from fake_hub import COMMIT, FakeHub, hub_environment
from http_servers import answering

from quire.enginecore.loading import model_files
from quire.enginecore.loading.convert_tokenizer import missing_packages
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import (
    converted_tokenizer,
    frontend_files,
    model_summary,
    resolve_model,
    resolve_tokenizer,
)


@pytest.fixture
def folder(tmp_path):
    """A model's folder that a test may spoil."""
    return shutil.copytree(tiny_models.tiny_model("llama"), tmp_path / "model")


def edit(path, **changes):
    """Set fields of a JSON file; `...` removes one."""
    fields = {**json.loads(path.read_text()), **changes} if path.exists() else changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


# ------------------------------------------------------------------------------------------------------- local folders
def test_local_folder_is_taken_as_it_is(folder):
    assert resolve_model(str(folder)) == folder.resolve()
    assert resolve_tokenizer(None, folder) == folder
    assert resolve_tokenizer(str(folder), Path("/elsewhere")) == folder.resolve()
    assert resolve_model(None) == Path(model_files.__file__).parent / "bundled"


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "a/b/c", "../up", "owner/na me", "owner/..", "http://x/y"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_without_a_download(name):
    with pytest.raises(ModelFilesError, match="neither a folder nor a hub id"):
        resolve_model(name)


def test_incomplete_folders_name_what_is_missing(folder):
    with pytest.raises(ModelFilesError, match="is a file"):
        resolve_model(str(folder / "config.json"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"no model\.safetensors"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), weights=False) == folder.resolve()
    (folder / "config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve_model(str(folder), weights=False)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        resolve_tokenizer(None, folder)


# ------------------------------------------------------------------------------------------------------- summary
def test_summary_of_a_model(folder):
    summary = model_summary(folder)
    assert summary.max_model_len == 512 and summary.eos_token_ids == [tiny_models.EOS, tiny_models.IM_END]
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert model_summary(folder).max_model_len == 100


def test_eos_ids_are_the_union_of_all_sources(folder):
    assert model_summary(folder).eos_token_ids == [tiny_models.EOS, tiny_models.IM_END]
    edit(folder / "config.json", eos_token_id=[7, 9, 100000])
    edit(folder / "generation_config.json", eos_token_id=8)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    assert model_summary(folder).eos_token_ids == [tiny_models.IM_END, 7, 8, 9]
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert model_summary(folder).eos_token_ids == [7, 9]
    edit(folder / "config.json", eos_token_id=None)
    assert model_summary(folder).eos_token_ids == []
    edit(folder / "config.json", eos_token_id=list(range(40)))
    with pytest.raises(ModelFilesError, match="at most 16"):
        model_summary(folder)


def test_eos_token_is_found_in_every_tokenizer_file(folder):
    edit(folder / "tokenizer_config.json", eos_token="<x>", added_tokens_decoder={"512": {"content": "<x>"}})
    assert model_files.tokenizer_eos_id(folder) == 512
    edit(folder / "tokenizer_config.json", eos_token=..., added_tokens_decoder=...)
    assert model_files.tokenizer_eos_id(folder) is None
    edit(folder / "special_tokens_map.json", eos_token="<|im_start|>")
    assert model_files.tokenizer_eos_id(folder) == tiny_models.IM_START
    edit(folder / "special_tokens_map.json", eos_token="nowhere")
    assert model_files.tokenizer_eos_id(folder) == 512  # added, as transformers does


@pytest.mark.parametrize(
    "changes, length",
    [
        ({"rope_parameters": None}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}, 400),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, 512),
    ],
)
def test_context_length_follows_rope_scaling(folder, changes, length):
    edit(folder / "config.json", **changes)
    assert model_summary(folder).max_model_len == length


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": (1 << 24) + 1},
        {"max_position_embeddings": 10**12},
        {"rope_scaling": {"type": "linear", "factor": 1 << 20}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 10**30}},
    ],
)
def test_context_length_has_a_bound(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelFilesError, match=r"max_position_embeddings.* at most 16777216"):
        model_summary(folder)
    edit(folder / "config.json", max_position_embeddings=1 << 24, rope_scaling=None)
    assert model_summary(folder).max_model_len == 1 << 24


def test_generation_defaults_can_be_turned_off_or_come_from_elsewhere(folder, tmp_path):
    edit(folder / "generation_config.json", temperature=0.6)
    assert model_summary(folder, generation_config="vllm").eos_token_ids == [tiny_models.EOS, tiny_models.IM_END]
    assert "generation_config.json" not in frontend_files(folder, generation_config="vllm")
    (tmp_path / "other").mkdir()
    edit(tmp_path / "other" / "generation_config.json", min_p=0.1, repetition_penalty=1.1, top_k=None)
    files = frontend_files(folder, generation_config=str(tmp_path / "other"))
    assert json.loads(files["generation_config.json"])["min_p"] == 0.1
    edit(tmp_path / "other" / "generation_config.json", min_p=7)
    with pytest.raises(ModelFilesError, match="min_p"):
        model_summary(folder, generation_config=str(tmp_path / "other"))
    with pytest.raises(ModelFilesError, match="--generation-config"):
        model_summary(folder, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 2}, {"max_new_tokens": 1.5}])
def test_generation_defaults_are_held_to_the_bounds(folder, bad):
    edit(folder / "generation_config.json", **bad)
    with pytest.raises(ModelFilesError, match=r"generation_config\.json.*--generation-config vllm"):
        model_summary(folder)
    model_summary(folder, generation_config="vllm")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_broken_json_is_named(folder, name):
    for text in ("{", "[1]", "\udce4", "[" * 100_000):
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ModelFilesError, match=name.replace(".", r"\.")):
            model_summary(folder)


# ------------------------------------------------------------------------------------------------------- frontends' files
def test_frontends_are_sent_the_closed_list_of_files(folder):
    (folder / "secret.json").write_text("{}")
    files = frontend_files(folder)
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    (folder / "chat_template.jinja").write_text("own")
    assert frontend_files(folder)["chat_template.jinja"] == b"own"


def test_chat_template_may_be_a_file_or_the_text_itself(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert frontend_files(folder, chat_template=str(tmp_path / "t.jinja"))["chat_template.jinja"] == b"{{ messages }}"
    assert frontend_files(folder, chat_template="{{ x }}")["chat_template.jinja"] == b"{{ x }}"
    long = "{{ x }}" + "y" * 10000
    assert frontend_files(folder, chat_template=long)["chat_template.jinja"] == long.encode()
    with pytest.raises(ModelFilesError, match="--chat-template"):
        frontend_files(folder, chat_template="no-such-file.jinja")


def gpt2_tokenizer(folder):
    """The tiny tokenizer as vocab.json and merges.txt only."""
    folder.mkdir()
    tiny_models.tokenizer().model.save(str(folder))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    settings["unk_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
def test_other_tokenizers_are_converted_once_by_a_child(tmp_path):
    from tokenizers import Tokenizer

    folder, cache = gpt2_tokenizer(tmp_path / "gpt2"), tmp_path / "cache"
    made = Tokenizer.from_buffer(converted_tokenizer(folder, cache))
    (path,) = cache.rglob("tokenizer.json")
    text = "A quire holds twenty-four sheets, naïvely 你好."
    assert made.encode(text).ids == tiny_models.tokenizer().encode(text).ids
    written = path.stat().st_mtime_ns
    assert converted_tokenizer(folder, cache) == path.read_bytes() and path.stat().st_mtime_ns == written
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"], "nothing half-made is left"


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_to_is_done_without(tmp_path):
    folder = gpt2_tokenizer(tmp_path / "gpt2")
    assert converted_tokenizer(folder, Path("/proc/nowhere")) == converted_tokenizer(folder, tmp_path / "cache")


def test_no_folder_to_convert_a_tokenizer_in_is_an_error_that_names_both(tmp_path, monkeypatch):
    monkeypatch.setitem(vars(tempfile), "tempdir", "/proc/nowhere")
    with pytest.raises(ModelFilesError, match=r"XDG_CACHE_HOME moves it.*TMPDIR moves it"):
        converted_tokenizer(gpt2_tokenizer(tmp_path / "gpt2"), Path("/proc/nowhere"))


def test_a_sentencepiece_model_alone_names_the_packages_that_it_needs(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    assert missing_packages(tmp_path) == [name for name in ("sentencepiece",) if importlib.util.find_spec(name) is None]
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert missing_packages(tmp_path)[-1] == "protobuf"
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's form
    assert missing_packages(tmp_path) == []


@pytest.mark.slow
def test_a_tokenizer_that_cannot_be_converted_says_why(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "vocab.json").write_text("{")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelFilesError, match=r"cannot be converted to tokenizer\.json: \w+"):
        converted_tokenizer(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


def test_core_side_imports_no_torch_and_no_hub():
    code = (
        "import sys; import quire.enginecore.loading.model_files; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------- the hub
@pytest.fixture(scope="module")
def hub():
    with answering(FakeHub(tiny_models.tiny_model("llama"))) as server:
        yield server


def resolve_in_child(hub, cache, *calls, **env):
    """Call resolve_model(**call) in a process of its own (the hub's library reads its environment when imported).

    One line a call: the files of the folder, or the error.
    """
    code = (
        "import json, os, sys, quire.enginecore.loading.model_files as m\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        folder = m.resolve_model(**call)\n"
        "        print('ok', *sorted(os.listdir(folder)))\n"
        "    except m.ModelFilesError as error:\n"
        "        print('error', error)\n"
    )
    environment = hub_environment(hub, cache, **env)
    child = subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps(calls)], capture_output=True, text=True, env=environment, timeout=200
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


TINY = {"model": "owner/tiny"}


def test_hub_model_is_downloaded_once_and_only_what_is_needed(hub, tmp_path):
    hub.downloaded.clear()
    wanted = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    small = [name for name in wanted if name != "model.safetensors"]
    lines = resolve_in_child(hub, tmp_path, {**TINY, "weights": False}, TINY, HF_TOKEN="hf_secret")
    assert lines == ["ok " + " ".join(small), "ok " + " ".join(wanted)]
    assert sorted(hub.downloaded) == wanted, "each file once, no pickles, no second copy of the weights"
    assert "Bearer hf_secret" in hub.tokens
    assert (tmp_path / "hub" / "models--owner--tiny" / "refs" / "main").read_text() == COMMIT

    hub.downloaded.clear()
    offline = resolve_in_child(hub, tmp_path, TINY, HF_HUB_OFFLINE="1")
    unreachable = resolve_in_child(hub, tmp_path, {**TINY, "revision": COMMIT}, HF_ENDPOINT="http://127.0.0.1:9")
    assert offline == unreachable == ["ok " + " ".join(wanted)]
    assert not hub.downloaded


def test_small_files_alone_are_not_a_model_offline(hub, tmp_path):
    resolve_in_child(hub, tmp_path, {**TINY, "weights": False})
    (line,) = resolve_in_child(hub, tmp_path, TINY, HF_HUB_OFFLINE="1")
    assert line.startswith("error owner/tiny")


def test_download_dir_and_revision_are_respected(hub, tmp_path):
    call = {**TINY, "revision": COMMIT, "download_dir": str(tmp_path / "here"), "weights": False}
    assert resolve_in_child(hub, tmp_path / "home", call)[0].startswith("ok config.json")
    assert (tmp_path / "here" / "models--owner--tiny" / "snapshots" / COMMIT / "config.json").exists()


def test_hub_errors_say_what_to_do(hub, tmp_path):
    (tmp_path / "file").touch()
    lines = resolve_in_child(
        hub,
        tmp_path,
        {"model": "owner/gated"},
        {"model": "owner/absent"},
        {**TINY, "revision": "nothere"},
        {**TINY, "download_dir": str(tmp_path / "file")},
    )
    assert lines[0].startswith("error owner/gated is gated: accept its terms")
    assert lines[1].startswith("error owner/absent is neither a local folder nor a model on the hub")
    assert lines[2] == "error owner/tiny has no revision nothere on the hub"
    assert lines[3].startswith("error owner/tiny cannot be downloaded: ")
    for env in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        (line,) = resolve_in_child(hub, tmp_path / "empty", TINY, **env)
        assert line.startswith("error owner/tiny is not (completely) in the local cache, and the hub cannot be reached")
