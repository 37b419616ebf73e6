"""Tools that an API's own servers run: they are left out here, with one log line a type and process.

Agents have some of them on by default (Codex: web_search), and work without them. A `tool_choice` that names one is refused.
Routes call this where they read tools.
"""

import logging

logger = logging.getLogger("quire.http")

# OpenAI's and Anthropic's. A type is one of these, or begins with one: web_search_preview, computer_20250124, mcp_toolset.
_TYPES = (
    "advisor",
    "agent_toolset",
    "apply_patch",
    "bash",
    "code_execution",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "memory",
    "programmatic_tool_calling",
    "shell",
    "text_editor",
    "tool_search",
    "web_fetch",
    "web_search",
)
_MAX_SAID, _MAX_CHARS = 64, 64  # clients choose the types' endings
_said: set[str] = set()


def is_left_out(kind: object) -> bool:
    """Whether this type of tool is known, and not run here."""
    if not isinstance(kind, str):
        return False
    kind = kind.replace("-", "_")
    return any(kind == known or kind.startswith(f"{known}_") for known in _TYPES)


def leave_out(kind: str) -> None:
    """Log that tools of this type are left out, once a process."""
    kind = kind[:_MAX_CHARS]
    if kind not in _said and len(_said) < _MAX_SAID:
        _said.add(kind)
        logger.warning("left out: tools of type %r, which this server does not run (said once for each type)", kind)


def said() -> frozenset[str]:
    """The types that were logged."""
    return frozenset(_said)
