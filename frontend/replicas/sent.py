"""Sent: a request of Replicas that runs at one of its engines, or is about to."""

from dataclasses import dataclass, field

from quire.frontend.client.terms import Terms
from quire.frontend.replicas.router import Choice
from quire.ipc.messages.frontend import AddRequest


@dataclass(slots=True)
class Sent:
    """A running request. choice: None once it has begun; until then it may be refused and sent elsewhere."""

    engine: int
    choice: Choice | None
    request: AddRequest
    terms: Terms
    refused: set[int] = field(default_factory=set)

    @property
    def adapter(self) -> str:
        """Empty for the model itself."""
        return "" if self.request.adapter is None else self.request.adapter.name
