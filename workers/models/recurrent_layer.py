"""RecurrentLayer: the base of layers that keep a state of each sequence; each kind is in a file of its own.

With windows (kernels/recurrent/rows.py) a state stays a step behind, and the layer keeps inputs of tokens.
"""

from quire.workers.layers.module import Module
from quire.workers.models.step_context import StepContext


class RecurrentLayer(Module):
    def apply_kept(self, context: StepContext) -> None:
        """Apply what is kept of the context's rows to their states. The rows have no tokens."""
        raise NotImplementedError
