"""`quire complete`, `models`, `collect-env` and `completion`; `chat -q`."""

import argparse
import io
import shutil
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S
from fake_core import FakeCore
from served import ROOMY, Served, say_hi
from terminals import Terminal, type_lines

from quire.frontend.cli import main as cli
from quire.frontend.cli import models
from quire.frontend.cli.collect_env import report, versions
from quire.frontend.cli.complete import complete
from quire.frontend.cli.completion import SHELLS, script
from quire.ipc.version import VERSION


def test_commands_that_ask_a_server(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with FakeCore(say_hi, limits=ROOMY) as core, Served("--engine", core.address, "--api-key", "k") as served:
        url = served.url()
        assert cli.main(["complete", "--url", f"{url}/v1", "-q", "once", "--max-tokens", "40"]) == 0
        assert cli.main(["chat", "--url", url, "-q", "hi", "--max-tokens", "40"]) == 0
        assert capsys.readouterr().out == "hello world!\nhello world!\n"
        out = io.StringIO()
        args = argparse.Namespace(url=url, api_key=None, cacert=None, model=None, quick=None, max_tokens=40, temperature=0.0)
        assert complete(args, io.StringIO("piped"), out) == 0 and out.getvalue() == "hello world!\n"
        assert complete(args, io.StringIO(""), out) == 1
        assert "nothing was piped in" in capsys.readouterr().err
        type_lines(monkeypatch, "once", "", KeyboardInterrupt, "twice", EOFError)
        assert complete(args, Terminal(), out) == 0 and out.getvalue().count("hello world!") == 3
        assert cli.main(["models", "--url", url]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0].split() == ["model", "length", "root"] and table[1].split() == ["toy", "4096", "toy"]
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        assert cli.main(["models", "--url", url]) == 1
        assert "--api-key" in capsys.readouterr().err


def test_nobody_answers(capsys):
    for command in (["models"], ["complete", "-q", "x"]):
        assert cli.main([*command, "--url", "http://127.0.0.1:1"]) == 1
        assert "nobody answers" in capsys.readouterr().err


def test_models_on_this_disk(tmp_path, capsys):
    assert models._cached(str(tmp_path)) == []
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("a" * 40)
    assert cli.main(["models", "--cached", "--download-dir", str(tmp_path)]) == 0
    assert "org/name  0.0 GB  main" in capsys.readouterr().out
    assert cli.main(["models", "--cached", "--download-dir", str(tmp_path / "no")]) == 1
    assert "no" in capsys.readouterr().err


def test_a_report_has_versions_and_no_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret too")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert cli.main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert f"quire: {VERSION}" in out and "secret" not in out and "environment, HF_TOKEN: set" in out
    assert "environment, CUDA_VISIBLE_DEVICES: 3" in out and versions()["torch"] != "not installed"
    assert {"python", "CPU", "memory", "open files", "GPU"} <= {name for name, _ in report()}


@pytest.mark.parametrize("command", ["collect-env", "completion bash"])
def test_a_reader_that_has_enough_is_no_error(command):
    writing = subprocess.Popen(
        [sys.executable, "-m", "quire", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    writing.stdout.close()
    assert writing.stderr.read() == "" and writing.wait(DEADLINE_S) == 1
    writing.stderr.close()


# ---------------------------------------------------------------------------------------------------------- completion
@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_know_all_commands_and_flags(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert said == script(cli._parser(), shell)
    flags = ["max-model-len", "scheduling-policy", "percentile-metrics", "gpu-memory"]
    assert all(word in said for word in ("serve", "bench", "throughput", "estimate", "collect-env", *flags))


def offered(script_file, line: str) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    ask = f"""
source {script_file}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
_quire
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=DEADLINE_S, cwd=script_file.parent)
    assert done.stderr == ""
    return set(done.stdout.splitlines())


def test_bash_offers_what_may_follow(tmp_path):
    file = tmp_path / "quire.bash"
    file.write_text(script(cli._parser(), "bash"))
    assert subprocess.run(["bash", "-n", str(file)], timeout=DEADLINE_S).returncode == 0
    assert {"serve", "chat", "bench"} <= offered(file, "quire ") and offered(file, "quire ser") == {"serve"}
    assert offered(file, "quire serve --max-model") == {"--max-model-len"}
    assert offered(file, "quire serve model --scheduling-policy ") == {"fcfs", "priority"}
    assert offered(file, "quire bench ") >= {"serve", "latency"} and "--num-iters" in offered(file, "quire bench latency --num")
    assert offered(file, "quire completion ") >= set(SHELLS)
    assert offered(file, "quire serve --dtype b") == {"bfloat16"} and "L4" in offered(file, "quire estimate --gpu ")
    assert offered(file, "quire serve --config ") == {"quire.bash"}
    assert "--port" in offered(file, "quire serve --enforce-eager ")
    assert offered(file, "quire serve ./qui") == {"./quire.bash"} and offered(file, "quire serve quire.b") == {"quire.bash"}


def test_bash_offers_values_after_an_equals_sign_and_files_with_spaces(tmp_path):
    file = tmp_path / "quire.bash"
    file.write_text(script(cli._parser(), "bash"))
    (tmp_path / "my certificate").touch()
    assert offered(file, "quire serve --dtype = b") == {"bfloat16"}  # bash cuts --dtype=b into three words
    assert offered(file, "quire serve --dtype =") >= {"bfloat16", "half"}
    assert offered(file, "quire serve --ssl-certfile my") == {"my certificate"}


ZSH = """
compdef() { }
compset() { PREFIX=${PREFIX#*=} }
compadd() { print -l -- ${(M)${(P)2}:#$PREFIX*} }
_files() { print FILES }
source %s
words=(%s)
CURRENT=$#words
PREFIX=$words[-1]
_quire
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not here")
def test_zsh_offers_what_may_follow(tmp_path):
    file = tmp_path / "_quire"
    file.write_text(script(cli._parser(), "zsh"))

    def offers(line: str) -> set[str]:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        done = subprocess.run(["zsh", "-f", "-c", ZSH % (file, words)], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert offers("quire ser") == {"serve"} and offers("quire completion ") >= set(SHELLS)
    assert offers("quire serve model --dtype b") == {"bfloat16"} == offers("quire serve --dtype=b")
    assert offers("quire bench serve --ba") == {"--backend", "--base-url"}
    assert offers("quire serve --config ") == {"FILES"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not here")
def test_fish_offers_what_may_follow(tmp_path):
    file = tmp_path / "quire.fish"
    file.write_text(script(cli._parser(), "fish"))

    def offers(line: str) -> set[str]:
        ask = ["fish", "-N", "-c", f"source {file}; complete -C '{line}'"]
        done = subprocess.run(ask, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert offers("quire ser") == {"serve"} and offers("quire completion ") >= set(SHELLS)
    assert offers("quire serve model --dtype b") == {"bfloat16"} and offers("quire serve --dtype=b") == {"--dtype=bfloat16"}
    assert "--ssl-certfile" in offers("quire serve --ssl") and not offers("quire bench serve --ssl")
    assert "--goodput" in offers("quire bench serve --goo") and not offers("quire serve --goo")


def test_no_flag_of_one_command_is_fishs_for_another():
    for line in script(cli._parser(), "fish").splitlines():
        assert "-l goodput" not in line or "'__quire_at bench serve'" in line


def test_a_parser_that_grows_is_completed():
    parser = argparse.ArgumentParser(prog="quire")
    parser.add_argument("--new-flag", choices=["a", "b"])
    for shell in SHELLS:
        assert "new-flag" in script(parser, shell)
