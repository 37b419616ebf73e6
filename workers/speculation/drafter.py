"""Drafter: the interface of what drafts tokens.

A drafter writes the tables' `drafts` and `num_drafts`. Drafts have no influence on the tokens of any sequence, only on
how many of them a step yields. Called by the device around a step's forward (devices/device.py); make.py chooses one.
"""

from abc import ABC, abstractmethod

from quire.kernels.step.tables import SlotTables, StepBuffers


class Drafter(ABC):
    @abstractmethod
    def extend(self, step: StepBuffers, num_tokens: int) -> None:
        """The inputs of a step of so many padded tokens are built. A part of the step's forward."""

    @abstractmethod
    def draft(self, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
        """A step of so many padded rows is done, its tokens are in the tables and its results are out: draft for its rows. They
        have no drafts now. A part of the step's sampling."""


class NoDrafter(Drafter):
    """Without speculation, and in stages that do not sample."""

    def extend(self, step: StepBuffers, num_tokens: int) -> None:
        pass

    def draft(self, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
        pass
