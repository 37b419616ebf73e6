"""What a process imports when it runs: torch only the worker, Triton no process of a CPU engine.

In processes of their own, since this one has imported everything long ago. `-P` as in production: the working directory is not
on the path.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import quire
from quire import LLM, SamplingParams
from quire.ipc.version import VERSION

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "triton")
# Runs by itself, once for a checkpoint, and ends: a tokenizer that is not a tokenizer.json is converted by transformers.
CONVERTER = "quire.enginecore.loading.convert_tokenizer"

IMPORT_ALL = f"""
import importlib, json, sys
found = {{}}
for name in sys.argv[1:]:
    importlib.import_module(name)
    found[name] = [heavy for heavy in {HEAVY} if heavy in sys.modules]
print(json.dumps(found))
"""


def modules(folder: str) -> list[str]:
    """Every module of a folder; the one file `__init__.py` is the package `quire`, which all of them import."""
    paths = sorted(path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")
    names = ["quire." + str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in paths]
    return [name.replace("quire.frontend.package.", "quire.") for name in names]


def python(*arguments: str, env: dict[str, str] | None = None) -> str:
    """Output of `python -P arguments`."""
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["ipc", "frontend", "enginecore"])
def test_these_folders_import_no_torch(folder):
    found = json.loads(python("-c", IMPORT_ALL, *(name for name in modules(folder) if name != CONVERTER)))
    assert {name: heavy for name, heavy in found.items() if heavy} == {}
    assert len(found) > 10


def test_the_package_imports_nothing_until_a_name_is_asked_for_and_then_no_torch():
    code = f"""if True:
        import sys
        import quire
        assert [name for name in sys.modules if name.startswith("quire.")] == []
        from quire import LLM, AsyncClient, SamplingParams, __version__
        assert [heavy for heavy in {HEAVY} if heavy in sys.modules] == []
        print(LLM.__module__, AsyncClient.__module__, SamplingParams.__module__, __version__)
    """
    modules = "quire.frontend.client.llm quire.frontend.client.async_client quire.ipc.sampling"
    assert python("-W", "error", "-c", code) == f"{modules} {VERSION}\n"


def test_a_script_beside_a_clone_named_quire_gets_the_package_and_not_the_clones_folder(tmp_path):
    """The folder of a script is first on its path: a folder `quire` there is the package to Python, whatever is installed."""
    (tmp_path / "quire").symlink_to(ROOT)
    code = """if True:
        from quire import LLM, AsyncClient, SamplingParams
        from quire.ipc.messages import frontend as messages
        from quire.sampling_params import RequestOutputKind
        print(messages.__file__)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / "ipc" / "messages" / "frontend.py"


def test_a_checkout_may_have_any_name():
    """pytest reads its init file as a module, if the folder's name is no identifier: as GitHub's archives', `quire-main`."""
    spec = importlib.util.spec_from_file_location("quire-main", ROOT / "__init__.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_package_names_what_it_has():
    assert set(quire.__all__) <= set(dir(quire))
    other_names = {"AsyncLLMEngine": "AsyncLLM"}
    for name in set(quire.__all__) - {"__version__", "PromptType"}:
        assert getattr(quire, name).__name__ == other_names.get(name, name)
    with pytest.raises(AttributeError, match=r"'quire' has no attribute 'Llm'"):
        _ = quire.Llm
    with pytest.raises(ImportError):
        from quire import Llm  # noqa: F401


def test_names_are_found_where_vllms_are():
    """As docs/migrating-from-vllm.md says, and nothing is left out there."""
    page = (ROOT / "docs/migrating-from-vllm.md").read_text()
    rows = re.findall(r"^\| `vllm[\w.]*` \| `(quire[\w.]*)` \| (.*) \|$", page, re.M)
    told = {ours: set(re.findall(r"`(\w+)`", names)) for ours, names in rows}
    assert told.pop("quire") == set(quire.__all__) - {"AsyncClient", "AsyncLLM", "BeamSearchParams", "RequestOutputKind",
                                                      "StructuredOutputsParams", "__version__"}  # fmt: skip
    package = ROOT / "frontend/package"
    files = {"quire." + ".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    files = {name.removesuffix(".__init__") for name in files}
    assert told.keys() == files - {"quire", "quire.__main__", "quire.entrypoints.openai.api_server"}
    for module, names in told.items():
        assert set(importlib.import_module(module).__all__) == names
        for name in names & set(quire.__all__):
            assert getattr(importlib.import_module(module), name) is getattr(quire, name)


def test_the_module_that_starts_vllms_server_starts_ours():
    command = [sys.executable, "-P", "-m", "quire.entrypoints.openai.api_server"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.stdout.startswith("usage: quire serve [MODEL]") and helped.returncode == 0
    refused = subprocess.run([*command, "--model", "m", "--enable-mm-embeds"], capture_output=True, text=True)
    assert "--enable-mm-embeds is not supported" in refused.stderr and refused.returncode == 2


def test_workers_import_no_transformers():
    """But for models that run by its code, which are imported when there is one."""
    own = "quire.workers.models.transformers."
    found = json.loads(python("-c", IMPORT_ALL, *(name for name in modules("workers") if not name.startswith(own))))
    assert {name for name, heavy in found.items() if "transformers" in heavy} == set()


def test_sizes_of_a_quantized_model_need_no_triton():
    """`quire estimate` builds it on the meta device, on machines that have no Triton."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 256}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64, **sizes}
    config |= {"rms_norm_eps": 1e-6, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    code = f"""if True:
        import sys
        sys.modules["triton"] = None
        from quire.ipc.memory_plan import SizesAsked
        from quire.workers.sizes import rank_sizes
        print(rank_sizes(SizesAsked({config})).num_parameters > 0)
    """
    assert python("-c", code) == "True\n"


def test_a_module_that_imports_torch_is_seen(tmp_path):
    (tmp_path / "torch.py").touch()  # which costs less than the real one
    (tmp_path / "hides_it.py").write_text("import torch")
    found = json.loads(python("-c", IMPORT_ALL, "json", "hides_it", env={**os.environ, "PYTHONPATH": str(tmp_path)}))
    assert found == {"json": [], "hides_it": ["torch"]}


@pytest.mark.parametrize("module", ["quire.frontend.cli.main", "quire.enginecore.cli"])
def test_help_needs_little(module):
    """The command line answers at once: neither messages, ZeroMQ nor tokenizers are loaded to print a page of help."""
    timed = subprocess.run([sys.executable, "-P", "-X", "importtime", "-m", module, "--help"], capture_output=True, text=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in timed.stderr.splitlines()}
    assert timed.stdout.startswith("usage: ") and timed.returncode == 0
    assert not imported & {*HEAVY, "tokenizers", "zmq", "uvloop", "numpy", "asyncio"}


@pytest.mark.slow
def test_a_cpu_engine_runs_where_triton_cannot_be_imported_and_only_its_worker_has_torch(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError('there is no Triton here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = psutil.Process().children(recursive=True)
    with LLM(device="cpu", max_model_len=64) as llm:
        outputs = llm.generate("Once", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        started = set(psutil.Process().children(recursive=True)).difference(before)
        libraries = {process.cmdline()[3]: mapped(process.pid) for process in started}
    assert len(outputs[0].outputs[0].token_ids) == 4
    assert sorted(libraries) == ["quire.enginecore", "quire.workers"]
    assert not any("libtorch" in library or "libtriton" in library for library in libraries["quire.enginecore"])
    assert any("libtorch" in library for library in libraries["quire.workers"])
    assert not any("libtriton" in library for library in libraries["quire.workers"])


def mapped(pid: int) -> set[str]:
    """File names of what a process has mapped: every extension module it has loaded is there."""
    return {os.path.basename(line.split(maxsplit=5)[-1].strip()) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
