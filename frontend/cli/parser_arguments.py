"""Flags of `quire serve` for tools and reasoning. The parsers' names are repeated here, so that --help imports none of them."""

import argparse

TOOL_CALL_PARSERS = (
    "deepseek_v3", "deepseek_v31", "granite", "hermes", "llama3_json", "llama4_json", "llama4_pythonic", "mistral", "pythonic",
    "qwen", "qwen3_coder", "qwen3_xml", "seed_oss",
)  # fmt: skip
REASONING_PARSERS = ("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "olmo3", "qwen3")
_HARMONY = ("gpt-oss", "gpt_oss", "gptoss", "harmony", "openai", "openai_gptoss")  # one format has both


def add_parser_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tools and reasoning")
    for flag, names, what in (
        ("--tool-call-parser", TOOL_CALL_PARSERS, "format in which the model writes tool calls"),
        ("--reasoning-parser", REASONING_PARSERS, "format in which the model writes its reasoning"),
    ):
        group.add_argument(
            flag,
            type=_parser_name,
            choices=("auto", "none", *names, *_HARMONY),
            default="auto",
            metavar="NAME",
            help=f"{what}: auto (found by the chat template), none, {', '.join((*names, *_HARMONY))} (default: %(default)s)",
        )


def _parser_name(name: str) -> str:
    return name.lower() if name.lower() in _HARMONY else name
