"""Adapters of a core: loads and unloads as frontends ask for them, requests that hold them, workers and files that go."""

import msgspec
import numpy as np
import pytest
from adapter_core import Core, expected
from adapter_folders import write_folder
from core_by_hand import EPOCH, add, kill

from quire.enginecore.adapters.adapters import CHANGED
from quire.enginecore.adapters.hub import Hub
from quire.ipc.adapters import HOST_ONLY, AdapterInfo, AdapterLimits, AdapterUse
from quire.ipc.messages.frontend import (
    AdaptersChanged,
    Heartbeat,
    RequestError,
    Resume,
    StepOutputs,
    Utility,
    UtilityResult,
)
from quire.ipc.messages.utilities import (
    AdapterLoaded,
    AdaptersRestored,
    AdapterUnloaded,
    FindAdapter,
    LoadFolder,
    PinAdapter,
    RestoreAdapters,
    UnloadAdapter,
    UtilityFailed,
)
from quire.workers.adapters.peft import read_adapter


@pytest.fixture
def core(tmp_path):
    made = Core(tmp_path)
    yield made
    made.close()


def test_a_loaded_adapter_answers_and_every_frontend_is_told(core, tmp_path):
    other = core.frontend()
    info = core.load("sql", write_folder(tmp_path / "a"))
    assert (info.name, info.file.folder, info.base_model) == ("sql", str(tmp_path / "a"), "tiny") and info.loaded_at > 0
    for frontend in (other,):
        told = core.answer(frontend, AdaptersChanged)
        assert (told.added, told.removed) == ([info], [])
    assert core.workers.loads == [(1, HOST_ONLY)]
    assert core.run(1, "sql") == expected(1) != expected(0)
    assert core.run(2, None) == expected(0)
    assert core.workers.loads == [(1, HOST_ONLY), (1, 0)]
    late = core.frontend_with_welcome()
    assert late.adapters == [info]


def test_a_load_in_place_has_a_new_number_and_requests_keep_the_old_one(core, tmp_path):
    folder = write_folder(tmp_path / "a")
    core.load("sql", folder)
    core.send(1, "sql", max_tokens=30)
    core.until(lambda: core.workers.worker.last_token)
    again = core.ask(LoadFolder("sql", str(folder)))
    assert isinstance(again, UtilityFailed) and again.message == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
    )
    write_folder(tmp_path / "a", fill=1)
    core.load("sql", folder, in_place=True)
    core.send(2, "sql")
    core.until(lambda: len(core.core.scheduler.slots.holders) == 2)
    assert core.adapters.stats().running == ["sql"], "the old one and the new one have the same name"
    outputs = {1: [], 2: []}
    while len(outputs[1]) < 30 or len(outputs[2]) < 6:
        message = core.answer(core.sender, StepOutputs)
        for key, token in zip(np.frombuffer(message.keys, np.int64), np.frombuffer(message.tokens, np.int32), strict=True):
            outputs[key >> 8].append(int(token))
    assert outputs[2] == expected(2)
    assert outputs[1] == expected(1, max_tokens=30)
    core.until(lambda: core.workers.forgotten == [1])


def test_an_unloaded_name_is_gone_and_its_requests_go_on(core, tmp_path):
    core.load("sql", write_folder(tmp_path / "a"))
    core.send(1, "sql", max_tokens=20)
    core.until(lambda: core.workers.worker.last_token)
    assert core.ask(UnloadAdapter("sql")) == AdapterUnloaded()
    assert core.ask(UnloadAdapter("sql")) == UtilityFailed("not_found", "The lora adapter 'sql' cannot be found.")
    core.send(2, "sql")
    error = core.output(2)
    assert (error.code, error.message) == ("not_found", "The model 'sql' does not exist.")
    core.until(lambda: core.core.scheduler.is_idle)
    core.until(lambda: core.workers.forgotten == [1])
    assert not core.adapters.registry.has_retired


@pytest.mark.parametrize(
    ("name", "path", "config", "code", "said"),
    [
        ("a,b", "a", {}, "invalid", "comma"),
        ("x" * 257, "a", {}, "invalid", "256 characters"),
        ("sql", "nowhere", {}, "not_found", "there is no folder"),
        ("sql", "../outside", {}, "invalid", "--lora-dirs"),
        ("sql", "link", {}, "invalid", "--lora-dirs"),
        ("sql", "a", {"use_dora": True}, "invalid", "use_dora"),
        ("sql", "a", {"r": 999}, "invalid", "sql: "),
    ],
)
def test_what_cannot_be_loaded_is_said_and_changes_nothing(core, tmp_path, name, path, config, code, said):
    write_folder(tmp_path / "a", **config)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    write_folder(outside)
    (tmp_path / "link").symlink_to(outside)
    answer = core.ask(LoadFolder(name, str(tmp_path / path)))
    assert isinstance(answer, UtilityFailed) and answer.code == code and said in answer.message
    assert not len(core.adapters.registry) and not core.workers.loads


def test_what_the_workers_refuse_is_not_registered(core, tmp_path):
    core.workers.adapter_errors[1] = "model.layers.0.self_attn.q_proj: shape [4, 9] does not fit"
    answer = core.ask(LoadFolder("sql", str(write_folder(tmp_path / "a"))))
    assert answer == UtilityFailed("invalid", "sql: model.layers.0.self_attn.q_proj: shape [4, 9] does not fit")
    core.until(lambda: core.workers.forgotten == [1])
    core.load("sql", tmp_path / "a")
    assert core.run(1, "sql") == expected(2)


def test_more_adapters_than_slots_take_turns(core, tmp_path):
    for i in range(4):
        core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
    for number in range(12):
        assert core.run(number, f"a{number % 4}") == expected(1 + number % 4)
    stats = core.adapters.stats()
    assert (stats.max_loras, stats.loads, stats.evictions) == (2, 12, 10)
    core.send(20, "a1", max_tokens=40)
    core.until(lambda: core.adapters.stats().running == ["a1"])
    assert core.answer(core.asker, Heartbeat).adapters.max_loras == 2


def test_requests_of_a_dead_worker_go_on_with_their_adapters(core, tmp_path):
    for i in range(3):
        core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
    core.send(1, "a0", max_tokens=12)
    core.send(2, "a1", max_tokens=12)
    core.send(3, "a2", max_tokens=12)
    core.until(lambda: len(core.workers.worker.last_token) == 2)
    kill(core.core)
    core.workers.start()
    outputs = {1: [], 2: [], 3: []}
    while min(map(len, outputs.values())) < 12:
        message = core.answer(core.sender, StepOutputs)
        for key, token in zip(np.frombuffer(message.keys, np.int64), np.frombuffer(message.tokens, np.int32), strict=True):
            outputs[key >> 8].append(int(token))
    assert outputs == {i: expected(i, max_tokens=12) for i in (1, 2, 3)}


def test_a_load_outlives_its_workers_once(core, tmp_path):
    core.asker.send(Utility(EPOCH, 99, LoadFolder("sql", str(write_folder(tmp_path / "a")))))
    core.workers.kept = []
    core.until(lambda: core.workers.kept)
    kill(core.core)  # it dies before it answers
    core.workers.kept = None
    core.workers.start()
    for call in core.workers.when_ready:
        call()
    core.workers.when_ready.clear()
    assert core.answer(core.asker, UtilityResult).answer.adapter.name == "sql"


def test_an_adapter_of_another_base_gets_a_line_in_the_log(core, tmp_path, caplog):
    core.adapters.begin_with({}, Hub(), ["sql-model", "/models/Tiny-1B/"])
    for base in ("owner/tiny-1b", "sql-model", ""):
        core.load("good", write_folder(tmp_path / "a", base_model_name_or_path=base), in_place=True)
    assert "was made for" not in caplog.text
    core.load("other", write_folder(tmp_path / "b", base_model_name_or_path="owner/Tiny-2B"))
    said = [record.getMessage() for record in caplog.records if "was made for" in record.getMessage()]
    assert said == ["adapter other was made for 'owner/Tiny-2B', which is no name of this model (sql-model, tiny-1b)"]
    caplog.clear()


def test_a_request_waits_for_a_load_that_is_under_way(core, tmp_path):
    """A successor of a lost engine is told of its adapters, and requests for them may come before they are there."""
    infos = [core.load("sql", write_folder(tmp_path / "a"))]
    core.ask(UnloadAdapter("sql"))
    core.asker.send(Utility(EPOCH, 50, RestoreAdapters(infos)))
    core.asker.send(Utility(EPOCH, 51, FindAdapter("sql")))
    core.send(1, "sql")
    assert core.output(1) == expected(2)
    found = {}
    while len(found) < 2:
        result = core.answer(core.asker, UtilityResult)
        found[result.id] = result.answer
    assert found == {50: AdaptersRestored([]), 51: AdapterLoaded(infos[0])}
    core.asker.send(Utility(EPOCH, 52, LoadFolder("bad", str(write_folder(tmp_path / "bad", use_dora=True)))))
    core.send(2, "bad")
    assert core.output(2).code == "not_found"


def test_on_demand_a_folder_is_a_model(tmp_path):
    core = Core(tmp_path, limits={"on_demand": True})
    try:
        write_folder(tmp_path / "sql")
        assert core.run(1, "sql") == expected(1)
        assert core.run(2, "other").code == "not_found"
        write_folder(tmp_path / "other")
        assert core.run(3, "other").code == "not_found", "it is remembered for a second"
        core.adapters._missing.clear()
        assert core.run(4, "other") == expected(2)
        for name in (".hidden", "../x", "a/b", ""):
            assert core.run(5, name or "..").code == "not_found"
        assert core.ask(FindAdapter("sql")).adapter.name == "sql"
    finally:
        core.close()


def test_without_on_demand_a_folder_is_none(core, tmp_path):
    write_folder(tmp_path / "sql")
    assert core.run(1, "sql").code == "not_found"
    assert core.ask(FindAdapter("sql")).code == "not_found"


def test_an_engine_without_adapters_refuses_them(by_hand):
    frontend = by_hand.frontend()
    frontend.send(msgspec.structs.replace(add(1), adapter=AdapterUse("sql")))
    error = by_hand.answer(frontend, RequestError)
    assert error.code == "invalid" and "--enable-lora" in error.message


def test_another_engine_s_adapters_are_restored_if_their_files_are_the_same(core, tmp_path):
    infos = []
    for i in range(3):
        infos.append(core.load(f"a{i}", write_folder(tmp_path / f"a{i}")))
        core.ask(UnloadAdapter(f"a{i}"))
    core.until(lambda: core.workers.forgotten == [1, 2, 3])
    write_folder(tmp_path / "a1", fill=3)
    core.load("a2", tmp_path / "a2")  # a later load: it wins
    now = {info.name: info for info in (a.info for a in core.adapters.registry)}
    assert core.ask(RestoreAdapters(infos)) == AdaptersRestored(["a1"])
    assert {a.name: a.info for a in core.adapters.registry} == {"a0": infos[0], "a2": now["a2"]}


def test_a_request_of_a_lost_engine_goes_on_with_the_same_file_only(core, tmp_path):
    info = core.load("sql", write_folder(tmp_path / "a"))
    file = info.file
    core.ask(UnloadAdapter("sql"))
    core.until(lambda: core.workers.forgotten)
    out = expected(2)  # the number that it gets here

    def resumed(number, file):
        request = add(number, num_tokens=10, max_tokens=6)
        task = msgspec.structs.replace(request.task, resume=Resume([np.asarray(out[:2], np.int32).tobytes()], 1))
        core.sender.send(msgspec.structs.replace(request, task=task, adapter=AdapterUse("sql", file)))
        return core.output(number)

    assert resumed(1, file) == out[2:]
    core.until(lambda: core.workers.forgotten == [1, 2])
    write_folder(tmp_path / "a", fill=5)
    error = resumed(2, file)
    assert error.code == "engine_error" and CHANGED in error.message


def test_a_task_of_the_model_is_found_by_its_name(tmp_path):
    """Each engine may have its own file of it."""
    core = Core(tmp_path / "dirs", limits={"tasks": ("sql",)})
    try:
        ours, theirs = (read_adapter(write_folder(tmp_path / name), AdapterLimits()) for name in ("ours", "theirs"))
        outcomes = core.adapters.begin_with({"sql": ours}, Hub())
        core.until(lambda: outcomes == {"sql": ""})
        request, out = add(1, num_tokens=10, max_tokens=6), expected(1)
        task = msgspec.structs.replace(request.task, resume=Resume([np.asarray(out[:2], np.int32).tobytes()], 1))
        core.sender.send(msgspec.structs.replace(request, task=task, adapter=AdapterUse("sql", theirs.file)))
        assert core.output(1) == out[2:]
        assert core.ask(RestoreAdapters([AdapterInfo("sql", theirs.file, loaded_at=1e12)])) == AdaptersRestored([])
        answer = core.ask(LoadFolder("sql", str(tmp_path / "ours"), in_place=True))
        assert answer == UtilityFailed("invalid", "The name 'sql' is that of one of the model's tasks.")
        assert core.run(2, "sql") == out
    finally:
        core.close()


def test_a_file_that_changed_meanwhile_is_loaded_anew_and_who_waits_is_told(core, tmp_path):
    for i in range(3):
        core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
    assert core.run(1, "a0") == expected(1)
    core.run(2, "a1")
    core.run(3, "a2")
    write_folder(tmp_path / "a0", fill=9)
    core.workers.adapter_errors[1] = "adapter_model.safetensors is another file now"
    error = core.run(4, "a0")
    assert error.code == "invalid" and "'a0' cannot be used any more" in error.message
    assert core.run(5, "a0") == expected(4), "a request that comes now waits for the new file"


def test_who_waits_too_long_for_a_slot_is_told_to_come_again(tmp_path):
    core = Core(tmp_path, limits={"max_loras": 1}, max_queue_s=5.0)
    try:
        for i in range(2):
            core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
        core.send(1, "a0", max_tokens=50)
        core.until(lambda: core.workers.worker.last_token)
        core.workers.answer = lambda: None  # the step does not end
        request = add(2)
        core.sender.send(msgspec.structs.replace(request, adapter=AdapterUse("a1"), is_bounded=True))
        core.until(lambda: len(core.core.scheduler.waiting) == 1)
        (seq,) = core.core.scheduler.waiting
        seq.arrival_time -= 6.0
        core.adapters._look_at = 0.0
        error = core.answer(core.sender, RequestError)
        assert (error.id, error.code, error.retry_after_s) == (2, "overloaded", 1) and "--max-queue-s" in error.message
    finally:
        core.close()


def test_a_pinned_adapter_stays(core, tmp_path):
    for i in range(4):
        core.load(f"a{i}", write_folder(tmp_path / f"a{i}"))
    assert isinstance(core.ask(PinAdapter("a0")), AdapterLoaded)
    assert core.ask(PinAdapter("a1")).code == "invalid", "one slot must be left"
    for number in range(6):
        assert core.run(number, f"a{1 + number % 3}") == expected(2 + number % 3)
    assert core.workers.loads.count((1, 0)) + core.workers.loads.count((1, 1)) == 1
    assert core.run(10, "a0") == expected(1)
