"""Settings of the whole suite, and which tests a run without `-m` is of."""

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

# A suite that is run in the background is born deaf to it, and so are its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of the tests are tiny: a second thread would only wait, for long where other processes want the cores, too.
# Set before torch is imported; children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same cases in every run, on every machine; `--hypothesis-profile=default` looks for others.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# What needs a machine or an environment of its own runs only where `-m` names it: `-m "not slow"` has none of these either.
ON_REQUEST = {"gpu", "interpret", "browser", "deploy", "ray"}

# The files that take longest, which begin first: one that began last would run alone, beside an idle core.
LONGEST = (
    "tests/fuzz/test_fuzz.py",
    "tests/test_greedy_equality.py",
    "tests/kernels/test_experts_row.py",
    "tests/enginecore/grammar/test_deferred.py",
    "tests/enginecore/grammar/test_structured_output.py",
    "tests/workers/test_models.py",
    "tests/test_tensor_parallel.py",
    "tests/serving/test_replicas.py",
    "tests/serving/test_hosts.py",
    "tests/serving/test_expert_parallel.py",
    "tests/clients/test_schemathesis.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    requested = {mark for mark in ON_REQUEST if mark in config.option.markexpr}
    left_out = []
    for item in items:
        marks = ON_REQUEST.intersection(mark.name for mark in item.iter_markers())
        if marks and not marks & requested:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=place)


def place(item: pytest.Item) -> int:
    file = item.nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports leave no garbage worth looking for: a fifth of their time went to collections of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: collections of garbage, which some tests ask for, need not look at it."""
    gc.collect()
    gc.freeze()
