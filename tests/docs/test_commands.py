"""Every command on the pages for users is run, and every block of code; what needs a GPU, Docker or a cluster is linted."""

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from doc_commands import (
    LINTED,
    PAGES,
    ROOT,
    SCRIPTS,
    Block,
    Command,
    Place,
    blocks,
    commands,
    inline_code,
    kind_of,
    words_of,
    yaml_kind,
)
from hosts import Agent, Keys
from launch_lines import parsed, serve_parser
from serving import SMALL, Daemon, Launched, Served

from quire.enginecore.cli import command_parser
from quire.frontend.cli import main as cli
from quire.frontend.cli.config_file import words_of as words_of_file
from quire.frontend.cli.vllm_flags import BY_FLAG, WORKING
from quire.frontend.http.limits.limits_file import parse_limits
from quire.ipc.process.flags import json_flags, normal_words

BLOCKS = blocks()
SHELL = [command for block in BLOCKS if block.language == "sh" for command in commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
LONG = ("LLM(", "bench startup", "bench latency", "bench throughput", "run-batch")  # each starts an engine
TIMEOUT_S = 120.0


def of(kind: str) -> list:
    return [
        pytest.param(c, id=f"{c.place} {c.text[:40]}", marks=pytest.mark.slow if any(w in c.text for w in LONG) else ())
        for c in SHELL
        if c.kind == kind
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def server(place):
    """The template for chats, as it is shipped, but for what a small CPU wants."""
    chat = str(ROOT / "docs/templates/chat.yaml")
    with Served(
        *SMALL, "--config", chat, "--profile-dir", str(place.folder), "--files-dir", str(place.folder / "kept")
    ) as served:
        yield served.ready()


def run(words: list[str], place: Place, **more) -> str:
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **more
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --------------------------------------------------------------------------------------------------------- nothing escapes
LANGUAGES = {"sh", "python", "yaml", "json", ""}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_is_of_a_known_kind(block):
    assert block.language in LANGUAGES, f"{block.place}: nothing here runs or lints {block.language!r}"
    if block.language == "":  # a picture: no command hides in it
        for line in filter(str.strip, block.text.splitlines()):
            first = line.split()[0].removeprefix(".venv/bin/")
            assert first not in {*SCRIPTS, *LINTED, "$", "quire", "enginecore", "curl", "make", "python"}, block.place


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_block_hides(path):
    """Fences begin and end at a line's beginning; there is no other way to show code."""
    text, page = path.read_text(), str(path.relative_to(ROOT))
    fences = re.findall(r"^[ \t>*-]*(?:`{3,}|~{3,})", text, re.M)
    assert len(fences) == 2 * sum(block.page == page for block in BLOCKS) and set(fences) <= {"```"}
    assert not re.search(
        r"<(?:pre|code)\b|^(?: {4}|\t)(?:\.venv/bin/)?(?:quire|enginecore|curl|make|python|docker|kubectl) ", text, re.M
    )


@pytest.mark.parametrize("words", [["wget", "x"], ["rm", "-r", "x"], ["quirk", "serve"]])
def test_a_command_of_no_kind_is_seen(words):
    with pytest.raises(ValueError, match="no known kind"):
        kind_of(words)


def test_blocks_are_cut_into_commands():
    text = "make run  # this\nA=1 quire serve --port 1\ncurl x -d '{\n  \"a\": 1\n}'\nquire \\\n  models\n"
    found = commands(Block("p", 1, "sh", text))
    assert [c.kind for c in found] == ["make", "server", "curl", "client"]
    assert found[0].text == "make run" and words_of(found[1].text)[0] == "quire" and found[2].text.count("\n") == 2
    with pytest.raises(ValueError, match="no end"):
        commands(Block("p", 1, "sh", "curl 'x"))
    with pytest.raises(ValueError, match="no known kind"):
        yaml_kind("nonsense: 1", set())


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=lambda block: block.place)
def test_shell_is_shell(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


# ------------------------------------------------------------------------------------------------------------------ server
@pytest.mark.parametrize("command", of("curl"))
def test_curl(command, place, server):
    text = place.of_this_place(command.text, server.url)
    run(["bash", "-c", text if "--fail" in text else text.replace("curl ", "curl --fail-with-body -sS ", 1)], place)
    if "/start_profile" in command.text:
        assert server.ask("POST", "/stop_profile").status == 200


@pytest.mark.parametrize("command", of("client"))
def test_commands_of_ours(command, place, server):
    words = words_of(place.of_this_place(command.text, server.url, server.engine_address()))[1:]
    if words[0] in ("chat", "complete", "models") and "--url" not in words and "--help" not in words:
        words += ["--url", server.url]
    if words[:2] == ["bench", "serve"]:
        words += ["--base-url", server.url, "--num-prompts", "4", "--input-len", "16", "--output-len", "4"]
    run([sys.executable, "-P", "-m", "quire.frontend.cli.main", *words], place, input="Hello!\n")


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=b.place, marks=pytest.mark.slow if re.search(r"LLM\(|InlineEngine\(", b.text) else ()) for b in PYTHON],
)
def test_python(block, place, server):
    run([sys.executable, "-c", place.of_this_place(block.text, server.url, server.engine_address())], place)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=lambda block: block.place)
def test_json(block, server):
    """An error is what a server says to such a value; a body is answered."""
    value = json.loads(block.text)
    if "error" in value:
        wrong = re.search(r"got (\S+?)\.$", value["error"]["message"])[1]
        answer = server.ask("POST", "/v1/completions", {"prompt": "a", value["error"]["param"]: json.loads(wrong)})
        assert answer.json() == value
    else:
        path = "/v1/chat/completions" if "messages" in value else "/v1/completions"
        assert server.ask("POST", path, {**value, "model": None}).status == 200


# ----------------------------------------------------------------------------------------------------------------- servers
def launch_words(command: Command, place: Place) -> list[str]:
    return words_of(place.of_this_place(command.text))


@pytest.mark.parametrize("command", of("server"))
def test_launch_lines_are_understood(command, place, monkeypatch):
    monkeypatch.chdir(place.folder)
    program, *words = launch_words(command, place)
    if program == "quire":
        args = parsed(*words[1:], name=words[0])
        assert not getattr(args, "engine", None) or getattr(args, "model", None) is None
    else:
        parser = command_parser()
        parser.parse_args(normal_words(words, json_flags(parser)))


@pytest.fixture(scope="module")
def daemon(place, tmp_path_factory):
    with Daemon(f"ipc://{tmp_path_factory.mktemp('engine')}/engine.sock", *SMALL) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def daemon_with_keys(place):
    keys = [
        "--curve-secret-key-file",
        str(place.folder / "engine.key"),
        "--curve-allow-file",
        str(place.folder / "frontends.allow"),
    ]
    with Daemon(f"tcp://127.0.0.1:{free_port()}", *SMALL, *keys) as started:
        yield started.ready()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("command", of("server"))
def test_launch_lines_start(command, place, request, tmp_path, monkeypatch):
    monkeypatch.chdir(place.folder)
    program, *words = launch_words(command, place)
    text = shlex.join(words)
    if program == "enginecore":
        text = re.sub(r"ipc:///\S+", f"ipc://{tmp_path}/engine.sock", text)
        text = re.sub(r"tcp://[\w.]+:\d+", f"tcp://127.0.0.1:{free_port()}", text)
        return started("quire.enginecore.cli", [*shlex.split(text), *SMALL], "Quire engine ready")
    text = re.sub(r"--interface eth\d", "", re.sub(r"--port \d+", "", text))
    if words[0] == "host":
        return started(
            "quire.frontend.cli.main", shlex.split(re.sub(r"tcp://\S+", "tcp://127.0.0.1:*", text)), "Quire host ready"
        )
    if "--hosts " in text:
        keys = Keys(tmp_path)
        with Agent(keys, "host") as agent:
            text = re.sub(r"--hosts \S+ --hosts-key-file \S+", shlex.join(keys.flags(agent)), text)
            text = re.sub(r"--tensor-parallel-size \d+", "--tensor-parallel-size 2", text)
            return started("quire.frontend.cli.main", [*shlex.split(text), "--port", "0", *SMALL], "Quire serves")
    if "--engine" in text and "tcp://" in text:
        engine = request.getfixturevalue("daemon_with_keys")
        text = text.replace(shlex.quote("--curve-engine-key=KEY"), "--curve-engine-key=KEY").replace(
            "--curve-engine-key=KEY", shlex.quote(f"--curve-engine-key={place.engine_keys.public.decode()}")
        )
        text = re.sub(r"tcp://HOST:\d+", engine.address, text)
    elif words[0] == "route":  # a daemon at each address
        addresses = [f"ipc://{tmp_path}/{i}.sock" for i in range(text.count("ipc://"))]
        left = iter(addresses)
        text = re.sub(r"ipc:///\S+", lambda _: next(left), text)
        with ExitStack() as stack:
            for address in addresses:
                stack.enter_context(Daemon(address, *SMALL)).ready()
            return started("quire.frontend.cli.main", [*shlex.split(text), "--port", "0"], "Quire serves")
    elif "--engine" in text:
        text = re.sub(r"ipc:///\S+", request.getfixturevalue("daemon").address, text)
    more = () if "--engine" in text else SMALL
    if "fullchain.pem" in text:
        for made in (c for c in SHELL if c.text.startswith("openssl")):
            run(["bash", "-c", made.text], place)
    started("quire.frontend.cli.main", [*shlex.split(text), "--port", "0", *more], "Quire serves")


def started(module: str, words: list[str], line: str) -> None:
    with Launched(module, *words) as process:
        process.line(line)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs/templates").glob("*.yaml")), ids=lambda path: path.name)
def test_templates_start_and_answer(path):
    with Served("--device", "cpu", "--config", str(path)) as served:
        assert served.ready().complete("What is 2 + 3?", max_tokens=4)["usage"]["completion_tokens"] > 0


# ------------------------------------------------------------------------------------------------------------- the others
@pytest.mark.parametrize("command", of("script"))
def test_scripts(command, place):
    run(["bash", "-c", command.text.replace("python ", f"{sys.executable} ", 1)], place)


@pytest.mark.parametrize("command", of("make"))
def test_make(command):
    done = subprocess.run(["bash", "-c", command.text.replace("make", "make -n", 1)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", of("linted") + of("module"))
def test_what_is_linted_is_well_formed(command):
    program, *words = words_of(command.text)
    if program == "vllm":  # what the same words do here
        parsed(*words[1:])
    elif program == "python" and words[:2] == ["-m", "pytest"]:
        named = [word for word in words if word.startswith("tests/")]
        assert named and [word for word in named if not (ROOT / word).exists()] == []
    elif program == "python":
        script = Path(words[0]) if words[0] != "-m" else Path(*words[1].split(".")[1:]).with_suffix(".py")
        assert (ROOT / script).exists()
    else:
        assert program in LINTED and words
        assert [word for word in words if word.startswith("deploy/") and not (ROOT / word).exists()] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: block.place)
def test_yaml(block, tmp_path):
    kind = yaml_kind(block.text, set(serve_parser().actions()))
    if kind == "flags":
        path = tmp_path / "flags.yaml"
        path.write_text(block.text)
        parsed("--config", str(path))
    elif kind == "limits":
        assert parse_limits(block.text.encode()).has_file
    elif kind == "prometheus":
        assert all(job["job_name"] and job["static_configs"] for job in yaml.safe_load(block.text)["scrape_configs"])


@pytest.mark.parametrize("path", sorted((ROOT / "docs/templates").glob("*.yaml")), ids=lambda path: path.name)
def test_templates_are_understood(path):
    assert words_of_file(str(path), serve_parser(), ())
    parsed("--config", str(path))


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_is_python(block):
    assert ast.parse(block.text).body


# ---------------------------------------------------------------------------------------------------------- within lines
NOT_OURS = {"--no-", "--target", "--profile", "--no-stream"}  # docker's, `vllm bench serve`'s


def every_flag() -> set[str]:
    found = {*BY_FLAG, *WORKING.split(), *command_parser().actions()}
    todo = [cli._parser()]
    while todo:
        found |= todo[-1].actions().keys()
        todo += cli.subcommands(todo.pop()).values()
    return found | {f"--no-{flag[2:]}" for flag in found if flag.startswith("--")}


def test_flags_within_lines_exist():
    known, unknown = every_flag(), []
    for page, text in inline_code():
        for word in shlex.split(text) if text.startswith("--") else ():
            flag = word.partition("=")[0].partition(".")[0]
            if flag.startswith("--") and flag not in known | NOT_OURS:
                unknown.append((page, flag))
    assert unknown == []


def test_commands_within_lines_exist():
    """Those of ours have only flags that they know; others are at least programs that may be named."""
    count = 0
    for page, text in inline_code():
        words = text.split()
        if len(words) < 2 or words[0] not in ("quire", "enginecore", "python", "make", "curl", *SCRIPTS, *LINTED):
            continue
        count += 1
        if words[0] == "quire":
            parser, path = cli.command_of(cli._parser(), words[1:])
            assert path, (page, text)
            flags = {word.partition("=")[0].partition(".")[0] for word in words if word.startswith("--") and word != "--help"}
            assert flags <= parser.actions().keys() | {"--help"}, (page, text)
        elif words[0] == "python":
            script = ROOT / (words[1] if words[1] != "-m" else words[2].removeprefix("quire.").replace(".", "/") + ".py")
            assert script.exists(), (page, text)
        elif words[0] == "make":
            assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0, (page, text)
    assert count > 20


@pytest.mark.parametrize(("page", "text"), [(p, t) for p, t in inline_code() if t.startswith("curl ")])
def test_curl_within_lines(page, text, place, server):
    test_curl(Command(page, "curl", text), place, server)
