"""Note: what docs/ says about a field of a body or an answer."""

from typing import NamedTuple

from field_table import Treatment


class Note(NamedTuple):
    text: str
    default: str = ""
    treatment: Treatment = "works"
    bounds: str = ""  # where they are not SamplingParams' of the same name
