"""aider: a coder that answers a question, streamed and not. It has no tools and no schemas: edits are text."""

import os
import tempfile

from asks import BASE_URL, CHAT, KEY, MODEL, Found

os.environ |= {"OPENAI_API_BASE": f"{BASE_URL}/v1", "OPENAI_API_KEY": KEY}
folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)

from aider.coders import Coder  # noqa: E402  reads its caches from the folder
from aider.io import InputOutput  # noqa: E402
from aider.models import Model  # noqa: E402


def coder(stream: bool) -> Coder:
    io = InputOutput(pretty=False, yes=True, chat_history_file=None, input_history_file=None)
    return Coder.create(Model(f"openai/{MODEL}"), "ask", io, use_git=False, map_tokens=0, stream=stream)


found = Found("aider-chat")
parts = list(coder(stream=True).run_stream(CHAT))
found.chat(coder(stream=False).run(CHAT), parts)
found.say()
