"""The header of a Harmony message: `assistant<|channel|>commentary to=functions.f <|constrain|>json`, read into its parts.

As openai-harmony reads it, which is the reference: the channel is the word after its marker; of the words that remain, the last
is the recipient if it begins with `to=` or is alone, or else the type of the content, after the recipient.
"""

import re
from typing import NamedTuple

from quire.frontend.text.harmony.tokens import CHANNEL, CONSTRAIN, MARKS, spelled
from quire.frontend.text.output_events import Content, Markup, Reasoning

_CHANNEL, _CONSTRAIN = MARKS[CHANNEL], MARKS[CONSTRAIN]
_CHANNEL_NAME = re.compile("[^\\s<\udc00-\udc06]*")
_ROLES = ("assistant", "user", "system", "developer", "tool")
_FUNCTIONS = "functions."
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class Header(NamedTuple):
    """role: None where there is none that is known. is_named: the recipient is written as `to=`. rest: its words, as text."""

    role: str | None
    channel: str
    recipient: str = ""
    is_named: bool = False
    rest: str = ""

    @property
    def function(self) -> str | None:
        """The function that the message calls; None if it is no call."""
        if self.channel == "final" or self.role not in (None, "assistant"):
            return None
        name = self.recipient.removeprefix(_FUNCTIONS)
        is_call = name != self.recipient or (self.channel == "commentary" and self.is_named and name not in (*_ROLES, "all"))
        return name if is_call and _FUNCTION.fullmatch(name) else None

    @property
    def kind(self) -> type[Content] | type[Reasoning] | type[Markup]:
        """The meaning of the message's text, if its client takes no calls or it is none."""
        if self.role not in (None, "assistant"):
            return Markup
        return Reasoning if self.channel == "analysis" and self.function is None else Content


def read_header(text: str, is_first: bool) -> Header:
    """text: with marks. is_first: the prompt has begun the message, with its role."""
    before, _, after = text.partition(_CHANNEL)
    found = _CHANNEL_NAME.match(after)
    assert found is not None
    rest = (before + after[found.end() :]).replace(_CONSTRAIN, f" {_CONSTRAIN}").split()
    role: str | None = "assistant" if is_first else None
    if rest and (rest[0] == "assistant" if is_first else rest[0] in _ROLES):
        role = rest.pop(0)
    elif not is_first and len(rest) > 1:
        role = "tool"  # a name with a recipient: the result of a call
        rest.pop(0)
    recipient = ""
    if rest:
        is_last = rest[-1].startswith("to=") or len(rest) == 1
        recipient = rest[-1] if is_last else rest[-2]
    is_named = recipient.startswith("to=")
    recipient = recipient.removeprefix("to=")
    return Header(role, found[0], spelled(recipient), is_named, spelled(" ".join(rest)))
