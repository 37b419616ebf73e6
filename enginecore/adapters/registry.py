"""AdapterRegistry: the adapters of one engine, by name, each with a number that is never used again. No I/O.

An adapter is one version of one folder's files. A load in place of another gives its name to a new number; the old one is
*retired*: it has no name, and stays until no sequence holds it. So has an adapter that only a request of a lost engine needs.
Adapters (adapters.py) decides what is loaded.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from quire.ipc.adapters import AdapterFile, AdapterInfo, AdapterPlan

log = logging.getLogger("quire.enginecore")


def last_part(name: str) -> str:
    """A model's name without its owner or folder, by which adapters and their base know each other."""
    return name.rstrip("/").rpartition("/")[2].casefold()


@dataclass(eq=False, frozen=True, slots=True)
class Adapter:
    """One version of an adapter. Sequences refer to it to their end."""

    number: int
    name: str
    plan: AdapterPlan
    loaded_at: float

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.plan.file, self.plan.base_model, self.loaded_at)

    def start_in(self, prompt: np.ndarray) -> int | None:
        """The first position of a prompt (int32) that it applies to: for an activated LoRA, that of the last occurrence of its
        invocation tokens. None: there is none, so it does not apply at all."""
        wanted = self.plan.invocation_tokens
        if not wanted:
            return 0
        num_places = len(prompt) - len(wanted) + 1
        if num_places <= 0:
            return None
        found = np.ones(num_places, bool)
        for i, token in enumerate(wanted):
            found &= prompt[i : i + num_places] == token
        places = found.nonzero()[0]
        return int(places[-1]) if len(places) else None


class AdapterRegistry:
    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._retired: dict[int, Adapter] = {}  # by number: without a name
        self._last_number = 0
        self.base_names: set[str] = set()  # of the model, as `last_part` has them; empty: not known

    def make(self, name: str, plan: AdapterPlan, loaded_at: float) -> Adapter:
        """A new adapter, which has no name yet: see `add`."""
        self._last_number += 1
        adapter = Adapter(self._last_number, name, plan, loaded_at)
        self._retired[adapter.number] = adapter
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Give an adapter its name; one that had it is retired."""
        self.remove(adapter.name)
        del self._retired[adapter.number]
        self._by_name[adapter.name] = adapter
        base = adapter.plan.base_model
        if base and self.base_names and last_part(base) not in self.base_names:
            names = ", ".join(sorted(self.base_names))
            log.warning("adapter %s was made for %.200r, which is no name of this model (%s)", adapter.name, base, names)

    def remove(self, name: str) -> Adapter | None:
        """Retire the adapter of this name, if there is one."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            self._retired[adapter.number] = adapter
        return adapter

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def is_current(self, adapter: Adapter) -> bool:
        """Whether it still has its name."""
        return self._by_name.get(adapter.name) is adapter

    def with_file(self, name: str, file: AdapterFile) -> Adapter | None:
        """An adapter of this name, now or before, of the same version of the same file."""
        current = self._by_name.get(name)
        if current is not None and current.plan.file == file:
            return current
        return next((a for a in self._retired.values() if a.name == name and a.plan.file == file), None)

    def __iter__(self) -> Iterator[Adapter]:
        """Those with names, in the order of their loads."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def drop_retired(self, held: Collection[int]) -> list[Adapter]:
        """Forget retired adapters and return them; `held` has the numbers of those in use, which stay."""
        dropped = [adapter for number, adapter in self._retired.items() if number not in held]
        for adapter in dropped:
            del self._retired[adapter.number]
        return dropped

    def check(self) -> None:
        """Assert that each number stands for one adapter, in one place."""
        named = [adapter.number for adapter in self._by_name.values()]
        assert all(name == adapter.name for name, adapter in self._by_name.items())
        assert all(number == adapter.number for number, adapter in self._retired.items())
        assert len({*named, *self._retired}) == len(named) + len(self._retired)
        assert all(0 < number <= self._last_number for number in (*named, *self._retired))
