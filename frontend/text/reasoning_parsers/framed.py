"""Formats with tags of their own: around the content as well, other words for the tags, or another end of reasoning."""

from quire.frontend.text.reasoning_parsers.base import ReasoningParser


class HunyuanA13B(ReasoningParser):
    """`<think>...</think><answer>...</answer>`."""

    needs_start = True
    frame = ("<answer>", "</answer>")


class Ernie45(ReasoningParser):
    """`<think>...</think><response>...</response>`; Granite 3.3 writes the same. The prompt opens Ernie's reasoning."""

    needs_start = False
    frame = ("<response>", "</response>")


class Granite(ReasoningParser):
    """Granite 3.2 says in words what comes: `Here is my thought process:` and `Here is my response:`. 3.3 has tags."""

    needs_start = True
    starts = ("Here is my thought process:", "Here's my thought process:", "<think>")
    ends = ("Here is my response:", "Here's my response:", "</think>")
    frame = ("<response>", "</response>")


class CohereCommand3(ReasoningParser):
    """Command A: `<|START_THINKING|>...<|END_THINKING|><|START_RESPONSE|>...<|END_RESPONSE|>`."""

    needs_start = True
    starts, ends = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
    frame = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CohereCommand4(CohereCommand3):
    frame = ("<|START_TEXT|>", "<|END_TEXT|>")


class Gemma4(ReasoningParser):
    """`<|channel>thought` on a line, reasoning, and `<channel|>`."""

    needs_start = True
    starts, ends = ("<|channel>",), ("<channel|>",)
    label = "thought\n"


class KimiK2(ReasoningParser):
    """`<think>...</think>`; a section of tool calls ends reasoning, too."""

    needs_start = True
    breaks = ("<|tool_calls_section_begin|>",)


class Mistral(ReasoningParser):
    """`[THINK]...[/THINK]`."""

    needs_start = True
    starts, ends = ("[THINK]",), ("[/THINK]",)


class SeedOss(ReasoningParser):
    """`<seed:think>...</seed:think>`."""

    needs_start = True
    starts, ends = ("<seed:think>",), ("</seed:think>",)
