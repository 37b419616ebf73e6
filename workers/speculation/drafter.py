"""Drafter: the interface of what drafts tokens.

A drafter writes the tables' `drafts` and `num_drafts`. Drafts have no influence on the tokens of any sequence, only on
how many of them a step yields. Called by the device around a step's forward (devices/device.py), and by the runner behind a
step; make.py chooses one.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from quire.ipc.step.plan import StepPlan
from quire.kernels.step.tables import SlotTables, StepBuffers


class Graphs(Protocol):
    """Where a drafter's passes are captured (graphs.StepGraphs)."""

    def prepare(self, key: Hashable, run: Callable[[], None]) -> None:
        """Capture what `run` launches, which is the same for an equal key. Raises torch.OutOfMemoryError."""
        ...

    def replay(self, key: Hashable, run: Callable[[], None], tokens: int) -> None:
        """Do what `run` launches; it is captured first if need be. tokens: of the pass."""
        ...


class Drafter:
    """This one drafts nothing: it is that of engines without speculation, and of stages that do not sample."""

    def begin(self, plan: torch.Tensor, tables: SlotTables) -> None:
        """A plan has come, of which nothing is done yet. A part of the step's forward."""

    def extend(self, step: StepBuffers, num_tokens: int) -> None:
        """The inputs of a step of so many padded tokens are built. A part of the step's forward."""

    def draft(self, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
        """A step of so many padded rows is done, its tokens are in the tables and its results are out: draft for its rows. They
        have no drafts now. A part of the step's sampling."""

    def follow(self, plan: StepPlan, tables: SlotTables, step: StepBuffers, graphs: Graphs | None) -> None:
        """The step of this plan was given to the device: give it the passes of a model that drafts. None of graphs: eager."""

    def run_kernels(self, tables: SlotTables, step: StepBuffers) -> None:
        """Run every kernel that such passes may need, on padding."""

    def capture(self, graphs: Graphs, tables: SlotTables, step: StepBuffers) -> None:
        """Capture the passes that serving begins with. Raises torch.OutOfMemoryError."""
