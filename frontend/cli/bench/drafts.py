"""How drafts fared during a benchmark: acceptance by place and mean accepted length, from a server's counters.

They are vLLM's counters at /metrics, or those of an engine of one's own, before and after the load. A server without
speculation, or one that shows no metrics, adds nothing to the figures.
"""

import re
import time
from collections.abc import Iterable
from typing import Any

from quire.frontend.cli.api_address import ChatError
from quire.frontend.cli.api_client import ChatServer
from quire.frontend.client.engine_metrics import Counter, Metric, Vector
from quire.ipc.messages.stats import SpeculationStats

HEARTBEAT_S = 0.6  # counters are at most half a second old
_NAME = "vllm:spec_decode_num_"
_SAMPLE = re.compile(rf"^{_NAME}(drafts|draft_tokens|accepted_tokens_per_pos)(?:_total)?{{(.*)}} (\S+)$", re.M)
_PLACE = re.compile(r'position="(\d+)"')


def counts_of_text(text: str) -> SpeculationStats | None:
    """The counters in a text of Prometheus' format, over all engines; None if they are not there."""
    totals, places = dict[str, int](), dict[int, int]()
    for name, labels, value in _SAMPLE.findall(text):
        if place := _PLACE.search(labels):
            places[int(place[1])] = places.get(int(place[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if totals.keys() != {"drafts", "draft_tokens"}:
        return None
    return SpeculationStats(totals["drafts"], totals["draft_tokens"], [places.get(i, 0) for i in range(len(places))])


def counts_of_metrics(metrics: Iterable[Metric]) -> SpeculationStats | None:
    """The counters in what `LLM.get_metrics` returns; None if they are not there."""
    numbers = {metric.name: metric.value for metric in metrics if isinstance(metric, Counter)}
    vectors = {metric.name: metric.values for metric in metrics if isinstance(metric, Vector)}
    by_place = vectors.get(f"{_NAME}accepted_tokens_per_pos")
    if by_place is None:
        return None
    return SpeculationStats(numbers[f"{_NAME}drafts"], numbers[f"{_NAME}draft_tokens"], by_place)


class ServerCounts:
    """The counters of a server, from this object's making on."""

    def __init__(self, server: ChatServer) -> None:
        self._server = server
        self._before = self._read()

    def since(self) -> SpeculationStats | None:
        """The counts of the time between; None without speculation. Waits for the newest counters."""
        if self._before is None:
            return None
        time.sleep(HEARTBEAT_S)
        after = self._read()
        same = after is not None and len(after.accepted_by_place) == len(self._before.accepted_by_place)
        return after.since(self._before) if after is not None and same else None

    def _read(self) -> SpeculationStats | None:
        try:
            return counts_of_text(self._server.text("/metrics"))
        except ChatError:  # no such route, or none for this key
            return None


def figures(counts: SpeculationStats | None) -> dict[str, Any]:
    """Under the keys of vLLM's result files; {} without drafts."""
    if counts is None or not counts.num_drafts:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * counts.accepted_tokens / counts.draft_tokens,
        "spec_decode_acceptance_length": 1 + counts.accepted_tokens / counts.num_drafts,
        "spec_decode_num_drafts": counts.num_drafts,
        "spec_decode_draft_tokens": counts.draft_tokens,
        "spec_decode_accepted_tokens": counts.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": [n / counts.num_drafts for n in counts.accepted_by_place],
    }


def rows(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """The lines of a report about `figures`, those without any left out."""
    if "spec_decode_num_drafts" not in found:
        return []
    lines = [
        ("Acceptance rate (%):", found["spec_decode_acceptance_rate"]),
        ("Acceptance length:", found["spec_decode_acceptance_length"]),
        ("Drafts:", found["spec_decode_num_drafts"]),
        ("Draft tokens:", found["spec_decode_draft_tokens"]),
        ("Accepted tokens:", found["spec_decode_accepted_tokens"]),
    ]
    rates = found["spec_decode_per_position_acceptance_rates"]
    return lines + [(f"Position {place} acceptance (%):", 100 * rate) for place, rate in enumerate(rates)]
