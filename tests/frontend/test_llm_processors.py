"""LLM(logits_processors=[...]) with the real engine: classes of files and modules, their arguments, and what goes wrong."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.frontend.client.llm import LLM
from quire.frontend.client.processor_names import with_processor_names
from quire.frontend.client.stream import EngineError
from quire.frontend.launcher import EngineStartError
from quire.ipc.sampling import SamplingParams

FILE = str(Path(__file__).parents[1] / "support/vllm_style.py")
SMALL = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "cpu_kv_cache_gib": 0.05}


def params(**extra_args) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, extra_args=extra_args or None)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(logits_processors=["vllm_style:OnlyToken", f"{FILE}:Repeat"], **SMALL) as llm:
        yield llm


def ids(llm: LLM, prompts: list[list[int]], asked: list[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, asked)]


def test_requests_with_arguments_and_without(llm):
    prompts = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    plain = ids(llm, prompts, [params()] * 4)
    asked = [params(), params(only=33), params(repeat=True), params(else_=1)]
    assert ids(llm, prompts, asked) == [plain[0], [33] * 6, [8, 9] * 3, plain[3]]


def test_children_of_one_request_take_part(llm):
    (output,) = llm.generate([[5, 6]], SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True, extra_args={"only": 40}))
    assert [list(o.token_ids) for o in output.outputs] == [[40] * 4] * 3


def test_a_class_may_refuse_a_request(llm):
    with pytest.raises(ValueError, match="only must be a token id, got 'x'"):
        llm.generate([[5]], params(only="x"))
    long = SamplingParams(max_tokens=1, extra_args={"only": 33}, allowed_token_ids=[33] * 300)
    assert ids(llm, [[5]], [long]) == [[33]]


def test_a_request_that_breaks_a_class_fails_alone(llm):
    with pytest.raises(EngineError, match="a logits processor of the engine failed on this request"):
        llm.generate([[5]], params(only=10**6))
    assert ids(llm, [[5]], [params(only=33)]) == [[33] * 6]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:Class", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("vllm_style:Gone", "AttributeError"),
        ("vllm_style:NOT_A_CLASS", "it is no class"),
        ("vllm_style.NotAProcessor", "it has no apply, update_state, is_argmax_invariant"),
        ("vllm_style:Unmakeable", "it cannot be made: RuntimeError: no such file"),
        ("/no/such/file.py:Class", "FileNotFoundError"),
        ("Class", "a class is named module:Class"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_loaded_is_named(name, text):
    with pytest.raises(EngineStartError) as failure:
        LLM(logits_processors=[name], **SMALL).shutdown()
    assert name.replace("vllm_style.", "") in str(failure.value).replace("vllm_style.", "") and text in str(failure.value)


def test_a_class_that_cannot_be_loaded_is_named():
    test_what_cannot_be_loaded_is_named("no_such_module:Class", "ModuleNotFoundError")


# ------------------------------------------------------------------------------------------------------ names of classes
class OfThisModule:
    class Inner:
        pass


def test_classes_travel_as_names():
    def names(*given):
        return with_processor_names({"logits_processors": list(given)})["logits_processors"]

    assert names("a.b:C", OfThisModule, OfThisModule.Inner) == [
        "a.b:C", f"{__name__}:OfThisModule", f"{__name__}:OfThisModule.Inner"
    ]  # fmt: skip
    assert with_processor_names({"seed": 1}) == {"seed": 1}

    class Local:
        pass

    with pytest.raises(ValueError, match="at the top of a file"):
        names(Local)
    for wrong in (3, OfThisModule()):
        with pytest.raises(ValueError, match="logits_processors"):
            names(wrong)
    with pytest.raises(ValueError, match="a list"):
        with_processor_names({"logits_processors": "a:B"})


def test_a_class_of_the_program_itself_travels_as_its_file(monkeypatch, tmp_path):
    import __main__

    program = tmp_path / "program.py"
    program.write_text("")
    monkeypatch.setattr(__main__, "__file__", str(program), raising=False)
    monkeypatch.setattr(OfThisModule, "__module__", "__main__")
    assert with_processor_names({"logits_processors": [OfThisModule]})["logits_processors"] == [f"{program}:OfThisModule"]
    monkeypatch.setattr(OfThisModule, "__module__", "_quire_program")
    with pytest.raises(RuntimeError, match="__main__"):
        with_processor_names({"logits_processors": [OfThisModule]})
    monkeypatch.setattr(OfThisModule, "__module__", "__main__")
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "gone.py"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        with_processor_names({"logits_processors": [OfThisModule]})


PROGRAM = """
from quire import LLM, SamplingParams
from quire.workers.logits_processors.interface import LogitsProcessor, process_dict_updates


class Only(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        self.only = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.only, batch_update, lambda params, prompt, output: params.extra_args["only"])

    def apply(self, logits):
        for row, token in self.only.items():
            logits[row, token] = 1e9
        return logits


def main():
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, extra_args={"only": 44})
    with LLM(device="cpu", max_model_len=256, cpu_kv_cache_gib=0.05, logits_processors=[Only]) as llm:
        print(llm.generate([[5]], params, use_tqdm=False)[0].outputs[0].token_ids)

"""


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_program_with_a_class_of_its_own(tmp_path, guarded):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + ('\nif __name__ == "__main__":\n    main()\n' if guarded else "\nmain()\n"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=200)
    if guarded:
        assert done.stdout.strip() == "[44, 44, 44, 44]", done.stderr
    else:
        assert done.returncode and "what it runs as a program belongs under" in done.stderr.splitlines()[-1]
