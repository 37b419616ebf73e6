"""Commands and code on the pages for users: fenced blocks of README.md, docs/ and deploy/, and commands within lines.

Everything in a fenced block has a kind, which determines how tests/docs/test_commands.py treats it; text without a kind fails
there, so that everything on a page is tested. `Place` is a folder with the files that the pages name: a model, a file of flags,
keys.
"""

import json
import re
import shlex
import shutil
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tiny_models import tiny_model

from quire.frontend.cli.vllm_flags import BY_FLAG
from quire.ipc.links.curve import make_keys, write_keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy/README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# First words of commands. linted: what needs a GPU, Docker, systemd or a cluster, or is not ours; its syntax is checked.
SCRIPTS = {"openssl", "cp", "export", "mkdir"}
LINTED = {
    "docker", "kubectl", "helm", "systemctl", "journalctl", "nvidia-smi", "kill", "vllm", "pip", "haproxy", "nginx", "promtool",
    "git", "sudo", "apt-get", "ray",
}  # fmt: skip
HUB_ID = re.compile(r"(?<![\w./-])(?:path/or/hub-id|(?:Qwen|meta-llama|mistralai)/[\w.-]+)")
LARGE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """text: as on the page, without a comment behind it."""

    place: str
    kind: str
    text: str


def blocks() -> list[Block]:
    found = []
    for path in PAGES:
        text, page = path.read_text(), str(path.relative_to(ROOT))
        for match in _FENCE.finditer(text):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2]))
    return found


def inline_code() -> list[tuple[str, str]]:
    """Page and text of code within lines."""
    return [(path.name, match) for path in PAGES for match in _INLINE.findall(_FENCE.sub("", path.read_text()))]


# ------------------------------------------------------------------------------------------------------------------ shell
def commands(block: Block) -> list[Command]:
    """Of a block of shell lines. Raises ValueError for what cannot be told apart."""
    found, text = [], ""
    if "<<" in block.text:
        raise ValueError(f"{block.place}: here-documents are not understood here")
    for line in block.text.splitlines():
        text = f"{text}\n{line}" if text else line
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if line.endswith("\\"):
            continue
        if words:
            found.append(Command(block.place, kind_of(words, block.place), _without_comment(text)))
        text = ""
    if text:
        raise ValueError(f"{block.place}: {text!r} has no end")
    return found


def _without_comment(text: str) -> str:
    """What follows a # that shlex takes for a comment; quotations hold none on the pages."""
    first, _, rest = text.partition("\n")
    return text if rest else re.sub(r"\s+#(?![^']*'(?:[^']*'[^']*')*[^']*$).*$", "", first)


def words_of(text: str) -> list[str]:
    """Without settings of the environment before it."""
    words = shlex.split(text, comments=True)
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0], re.DOTALL) and len(words) > 1:
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else words


def kind_of(words: list[str], place: str = "") -> str:
    """curl, client (a command of ours that ends), server, script, module, make or linted. Raises ValueError for none."""
    first, *rest = words_of(shlex.join(words))
    if first in ("quire", "enginecore"):
        is_server = first == "enginecore" or rest[:1] in (["serve"], ["route"])
        is_server |= rest[:1] == ["host"] and "--generate-keys" not in rest
        return "server" if is_server and not any(word.partition("=")[0] in ("--help", "-h") for word in rest) else "client"
    if first == "python" and rest[:1] == ["-c"]:
        return "script"
    if first == "python" and (rest[:1] == ["-m"] or rest[0].endswith(".py")):
        return "module"
    for kind, names in (("curl", {"curl"}), ("make", {"make"}), ("script", SCRIPTS), ("linted", LINTED)):
        if first in names:
            return kind
    raise ValueError(f"{place}: {first!r} is a command of no known kind; see tests/support/doc_commands.py")


# ------------------------------------------------------------------------------------------------------------------- YAML
def yaml_kind(text: str, serve_flags: set[str]) -> str:
    """What a block of YAML is. Raises ValueError for none of these."""
    value: Any = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise ValueError("a block of YAML is an object")
    if "scrape_configs" in value or "rule_files" in value:
        return "prometheus"
    if {"apiVersion", "kind"} <= value.keys():
        return "kubernetes"
    if "services" in value:
        return "compose"
    if all(f"--{name.replace('_', '-')}" in serve_flags or f"--{name}" in BY_FLAG for name in value):
        return "flags"
    if "*" in value:
        return "limits"
    raise ValueError(f"YAML of no known kind, with {', '.join(value)}")


# ------------------------------------------------------------------------------------------------------------------ place
class Place:
    """A folder with what commands on the pages name, and what they are told in place of what is not here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"  # tiny, but for its context: pages ask for long ones
        shutil.copytree(tiny_model("llama"), self.model)
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}))
        self.large_model = folder / "large-model"  # for estimates: it has no weights
        self.large_model.mkdir()
        (self.large_model / "config.json").write_text(json.dumps(LARGE))
        for name in ("docs", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "flags.yaml").write_text("max-num-seqs: 4\n")
        (folder / "keys.txt").write_text("one-key\nanother-key\n")
        body = {"model": "quire-tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 4}
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
        (folder / "files" / "contents").mkdir(parents=True)
        with sqlite3.connect(folder / "files" / "records.sqlite3") as connection:
            connection.execute("CREATE TABLE records (id TEXT)")
        connection.close()
        self.engine_keys, frontend_keys = make_keys(), make_keys()
        write_keys(folder / "engine.key", self.engine_keys)
        write_keys(folder / "frontend.key", frontend_keys)
        (folder / "frontends.allow").write_text(frontend_keys.public.decode() + "\n")
        (folder / "engines.allow").write_text(self.engine_keys.public.decode() + "\n")

    def of_this_place(self, text: str, url: str = "", engine: str = "") -> str:
        """A command or code as it runs here: against this server, this engine, a model that is on the disk."""
        text = HUB_ID.sub(str(self.large_model if "estimate" in text else self.model), text)
        if url:
            text = text.replace("http://127.0.0.1:8000", url).replace("http://localhost:8000", url)
        if engine:
            text = re.sub(r"ipc:///[\w./-]+\.sock", engine, text)
        return text
