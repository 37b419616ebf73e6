"""`--help` of a command with many flags: all flags by group; --help=listgroup, --help=GROUP and --help=TEXT show less."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

LIST_GROUPS = ("listgroup", "groups")


# vLLM's group names, and our groups that have most of their flags
_VLLMS_GROUPS = {
    "frontend": ("server", "TLS", "access", "requests", "tools and reasoning"),
    "modelconfig": ("model", "chat template and sampling defaults"),
    "loadconfig": ("model",),
    "parallelconfig": ("device and memory",),
    "cacheconfig": ("device and memory",),
    "schedulerconfig": ("batching and scheduling",),
    "observabilityconfig": ("access log and traces", "logs"),
    "vllmconfig": ("own code and profiles",),
}


class HelpTopics(argparse.Action):
    """-h and --help, with the topic to show as an optional value."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, metavar="TOPIC", **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        text = parser.format_help() if values in (None, "all", "page") else about(parser, str(values))
        if not text:
            parser.error(f"no group and no flag is like {values!r}; --help=listgroup lists the groups")
        parser._print_message(text.rstrip() + "\n", sys.stdout)
        parser.exit()


def about(parser: argparse.ArgumentParser, topic: str) -> str:
    """Help of a group, or of the flags that contain `topic`; "" if there are none."""
    groups = {group.title or "": group for group in parser._action_groups if group._group_actions}
    if topic in LIST_GROUPS:
        return "\n".join(["groups, for --help=GROUP:", *(f"  {title}" for title in groups)])
    wanted = topic.lower().lstrip("-").replace("_", "-")
    titles = [title for title in groups if wanted in (title.lower(), title.lower().replace(" ", "-"))]
    titles = titles or [title for title in _VLLMS_GROUPS.get(wanted, ()) if title in groups]
    if titles:
        return "\n".join(_section(parser, title, groups[title]._group_actions) for title in titles)
    found = [action for action in parser._actions if any(wanted in flag for flag in action.option_strings)]
    return _section(parser, f"flags like {wanted}", found) if found else ""


def _section(parser: argparse.ArgumentParser, title: str, actions: Iterable[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
