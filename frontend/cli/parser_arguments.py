"""Flags of `quire serve` for tools and reasoning. The parsers' names are repeated here, so that --help imports none of them."""

import argparse

TOOL_CALL_PARSERS = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "ernie45", "functiongemma", "gemma4",
    "gigachat3", "glm45", "glm47", "granite", "granite-20b-fc", "granite4", "hermes", "hunyuan_a13b", "hy_v3", "kimi_k2",
    "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minimax_m2", "mistral", "nemotron_json",
    "olmo3", "phi4_mini_json", "poolside_v1", "pythonic", "qwen", "qwen3_coder", "qwen3_xml", "seed_oss", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "ernie45", "gemma4", "glm45", "glm47", "granite",
    "holo2", "hunyuan_a13b", "hy_v3", "kimi_k2", "mimo", "minimax_m2", "minimax_m2_append_think", "mistral", "nano_v3",
    "nemotron_nano_v2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "seed_oss", "super_v3",
)  # fmt: skip
_SPARSE, _RECURRENT, _UNKNOWN = (
    "has sparse attention, which is not served here",
    "has recurrent layers of a kind that is not served here",
    "is a family that is not served here",
)
REFUSED = {  # vLLM's names of parsers for models that do not run here, with the model and the reason
    "deepseek_v32": ("DeepSeek V3.2", _SPARSE),
    "deepseek_v4": ("DeepSeek V4", _SPARSE),
    "hy_v4": ("HYV4", _SPARSE),
    "inkling": ("Inkling", _UNKNOWN),
    "internlm": ("InternLM 2", "runs by code in its checkpoint, which is never loaded here"),
    "jamba": ("Jamba", _RECURRENT),
    "kimi_k3": ("Kimi K3", _UNKNOWN),
    "minicpm5": ("MiniCPM5", _UNKNOWN),
    "minimax": ("MiniMax-M1", _RECURRENT),
    "minimax_m1": ("MiniMax-M1", _RECURRENT),
    "minimax_m3": ("MiniMax-M3", _SPARSE),
    "rwkv": ("RWKV", _RECURRENT),
    "solar_open2": ("Solar Open 2", _UNKNOWN),
    "step3": ("Step3", _UNKNOWN),
    "step3p5": ("Step-3.5", _UNKNOWN),
}
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
    if name in REFUSED:
        model, reason = REFUSED[name]
        raise argparse.ArgumentTypeError(f"{name}: this parser is for {model}, which {reason}")
    return name.lower() if name.lower() in _HARMONY else name
