"""GuidedDecodingParams: StructuredOutputsParams under vLLM's older name, with the options that it had then."""

from typing import Any, Self

from quire.ipc.structured_outputs_params import StructuredOutputsParams


class GuidedDecodingParams(StructuredOutputsParams):
    """backend has no effect: Quire has one backend."""

    def __init__(self, *args: Any, backend: str | None = None, backend_was_auto: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)

    @classmethod
    def from_optional(cls, **options: Any) -> Self | None:
        """As vLLM's: None if no constraint is given."""
        given = {name: value for name, value in options.items() if value is not None}
        return cls(**given) if given.keys() & {"json", "regex", "choice", "grammar", "json_object", "structural_tag"} else None
