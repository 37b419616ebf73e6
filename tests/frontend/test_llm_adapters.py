"""Adapters in Python: LoRARequest in LLM's calls, of the bundled model on a CPU."""

from pathlib import Path

import numpy as np
import pytest
from fake_hub import FakeHub, hub_environment
from http_servers import answering
from peft_folders import write_adapter

import quire.enginecore.loading.model_files
from quire import LLM, SamplingParams
from quire.lora.request import LoRARequest
from quire.sampling_params import BeamSearchParams

BUNDLED = Path(quire.enginecore.loading.model_files.__file__).parent / "bundled"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [str(write_adapter(root / f"a{i}", BUNDLED, seed=i, std=0.5)) for i in range(3)]


@pytest.fixture(scope="module")
def hub(folders):
    with answering(FakeHub(Path(folders[2]), "owner/sql")) as server:
        yield server


@pytest.fixture(scope="module")
def llm(hub, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hub_environment(hub, tmp_path_factory.mktemp("home")).items():
            patch.setenv(name, value)
        made = LLM(enable_lora=True, max_loras=2, max_num_seqs=4, cpu_kv_cache_gib=0.1, device="cpu", convert="embed")
    yield made
    made.shutdown()


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_each_prompt_may_have_its_own_adapter(llm, folders):
    loras = [None, *(LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(folders))]
    together = llm.generate(["Once upon a time"] * 4, GREEDY, lora_request=loras)
    alone = [llm.generate("Once upon a time", GREEDY, lora_request=lora)[0] for lora in loras]
    assert ids(together) == ids(alone) and len({tuple(each) for each in ids(alone)}) == 4
    assert [output.lora_request for output in together] == loras
    assert together[1].outputs[0].lora_request is loras[1]
    assert ids(llm.generate("Once upon a time", GREEDY)) == ids(alone[:1]), "the base is as it was"


def test_beams_chats_and_enqueued_requests_take_adapters(llm, folders):
    lora = LoRARequest("a1", 2, folders[1])
    (alone,) = llm.generate("Once", GREEDY, lora_request=lora)
    llm.enqueue(["Once"], GREEDY, lora_request=lora)
    assert ids(llm.wait_for_completion()) == ids([alone])
    (found,) = llm.beam_search("Once", BeamSearchParams(beam_width=1, max_tokens=6), lora_request=lora)
    assert found.sequences[0].tokens[-6:] == alone.outputs[0].token_ids
    hi = [{"role": "user", "content": "Hi"}]
    base, adapted = (llm.chat(hi, GREEDY, lora_request=each) for each in (None, lora))
    assert ids(base) != ids(adapted)


def test_vectors_are_those_of_an_adapter(llm, folders):
    lora = LoRARequest("a1", 2, folders[1])
    base, adapted, again = (llm.embed(["Once", "upon"], lora_request=each) for each in (None, lora, lora))
    encoded = llm.encode(["Once", "upon"], pooling_task="embed", lora_request=lora)
    for one, two, three, four in zip(base, adapted, again, encoded, strict=True):
        two, three = two.outputs.embedding, three.outputs.embedding
        assert np.abs(np.subtract(one.outputs.embedding, two)).max() > 1e-2
        assert np.abs(np.subtract(two, three)).max() < 1e-5 and np.abs(four.outputs.data - two).max() < 1e-5
    with pytest.raises(ValueError, match="must be a LoRARequest"):
        llm.embed("Once", lora_request="a1")


def test_an_engine_lists_removes_and_pins_its_adapters(llm, folders):
    engine = llm.llm_engine
    assert engine.add_lora(LoRARequest("fresh", 77, folders[2])) and not engine.add_lora(LoRARequest("fresh", 77, folders[2]))
    assert 77 in engine.list_loras() and engine.pin_lora(77)
    assert engine.remove_lora(77) and 77 not in engine.list_loras() and not engine.remove_lora(77)


def test_a_path_may_be_a_hub_id(llm, folders, hub):
    named = [ids(llm.generate("Once", GREEDY, lora_request=LoRARequest("hub", 9, "owner/sql"))) for _ in range(2)]
    assert named[0] == named[1] == ids(llm.generate("Once", GREEDY, lora_request=LoRARequest("a2", 3, folders[2])))
    assert sorted(hub.downloaded) == ["adapter_config.json", "adapter_model.safetensors"], "it is downloaded once"
    with pytest.raises(ValueError, match="owner/none is neither a local folder nor an adapter on the hub"):
        llm.generate("Once", GREEDY, lora_request=LoRARequest("none", 10, "owner/none"))


def test_what_cannot_be_used_is_said(llm, folders, tmp_path):
    with pytest.raises(ValueError, match="id must be > 0"):
        LoRARequest("a", 0, folders[0])
    with pytest.raises(ValueError, match="no folder"):
        llm.generate("Hi", GREEDY, lora_request=LoRARequest("a", 5, str(tmp_path / "nowhere")))
    broken = write_adapter(tmp_path / "b", BUNDLED, bias="all")
    with pytest.raises(ValueError, match="bias"):
        llm.generate("Hi", GREEDY, lora_request=LoRARequest("b", 6, str(broken)))
    with pytest.raises(ValueError, match="2 prompts and 1 lora_requests"):
        llm.generate(["Hi", "Ho"], GREEDY, lora_request=[LoRARequest("a0", 1, folders[0])])
