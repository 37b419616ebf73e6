"""Times candidates for a tuning table, by CUDA graphs over rotated operands and medians, and chooses among them.

A sweep runs twice: first within `compiling`, which compiles all kernels in parallel and times nothing, then for its times. A
candidate is left out if it cannot be compiled or launched, or if its result differs from the present one's. On a CPU (a dry
run in Triton's interpreter) a call is run once. `tune.py` and the sweeps call this.
"""

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

Call = Callable[[], torch.Tensor]
T = TypeVar("T")

ROTATED_BYTES = 256 << 20  # of all copies of the operands, which take turns: more than any L2 holds
MIN_CALLS = 20  # in a graph
SAMPLE_US = 1000.0  # least time of a sample
SAMPLES = 7
MARGIN = 0.02  # by which a candidate must be faster than the present choice: less is noise
TOLERANCE = 0.05  # of the largest value: allows for another order of sums in 16 bits


class DeviceLost(Exception):
    """A kernel broke the process's CUDA context: nothing more can be measured."""


class Bench:
    """A device, the time left, and the candidates and entries that failed or were skipped."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # the interpreter is exact in float32 only
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self.failed: list[str] = []  # candidates
        self.unmeasured: list[str] = []  # entries for which no time was left
        self._deadline = time.monotonic() + seconds
        self._compiles = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within, candidates are compiled and not timed."""
        before, self._compiles = (self.failed[:], self.unmeasured[:]), True
        try:
            if self.device.type == "cuda":
                from quire.kernels.triton_support.compile_ahead import compile_only

                with compile_only(os.cpu_count() or 1):
                    yield
            else:
                yield
        finally:
            self._compiles = False
            self.failed, self.unmeasured = before

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Within, calls go to a stream of their own: the default stream cannot be captured."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.device.type == "cuda" else contextlib.nullcontext()

    def is_late(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self._deadline

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def copies(self, bytes_each: int) -> int:
        """Number of operands that take turns."""
        return 1 if self._compiles or self.device.type == "cpu" else max(2, min(64, -(-ROTATED_BYTES // bytes_each)))

    def log(self, text: str) -> None:
        if not self._compiles:
            print(text, flush=True)

    def micros(self, calls: Sequence[Call], least: int = MIN_CALLS) -> float:
        """µs a call, over at least `least` calls; 1 while compiling. Raises what a call raises, or DeviceLost."""
        self._first_result(calls)
        return self._time(calls, least)

    def _first_result(self, calls: Sequence[Call]) -> torch.Tensor:
        try:
            result = calls[0]()
            if self.device.type == "cuda" and not self._compiles:
                torch.cuda.synchronize()
        except Exception:  # raised again, whatever the compiler or driver raised: the GPU may be lost with it
            self._check_device()
            raise
        return result

    def _time(self, calls: Sequence[Call], least: int = MIN_CALLS) -> float:
        if self._compiles:
            return 1.0
        if self.device.type == "cuda":
            return _graph_micros([*calls] * -(-least // len(calls)))
        begin = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - begin) * 1e6

    def fastest(self, name: str, present: T, candidates: Sequence[T], cases: Sequence[Callable[[T], Sequence[Call]]]) -> T:
        """The fastest candidate, by the ratio of its time to the present one's (geometric mean over `cases`).

        A case makes the calls to be timed for a candidate. The result of the first call is compared with the present one's. The
        present candidate stays if none is faster by MARGIN.
        """
        times: dict[int, list[float]] = {}
        results: list[torch.Tensor] = []
        tried = [present, *(candidate for candidate in candidates if candidate != present)]
        for number, candidate in enumerate(tried):
            if self.is_late():
                self.unmeasured.append(f"{name} from {candidate}")
                break
            try:
                times[number] = [self._timed(case, candidate, results, index) for index, case in enumerate(cases)]
            except DeviceLost:
                raise
            except Exception as error:  # any error of a compiler or a driver: this candidate is skipped
                self._check_device()
                self.failed.append(f"{name}: {candidate}: {type(error).__name__} {str(error)[:100]}")
                if not number:  # the present candidate itself fails: there is nothing to compare with
                    return present
        if not times:
            return present
        ratios = {n: math.exp(statistics.fmean(map(math.log, map(_ratio, each, times[0])))) for n, each in times.items()}
        best = min(ratios, key=ratios.__getitem__)
        best = best if ratios[best] < 1 - MARGIN else 0
        micros = " ".join(f"{us:.1f}" for us in times[best][:6])
        self.log(f"  {name}: {len(times)} of {len(tried)} tried, {tried[best]} takes {ratios[best]:.3f} ({micros} us)")
        return tried[best]

    def _timed(self, case: Callable[[T], Sequence[Call]], candidate: T, results: list[torch.Tensor], index: int) -> float:
        calls = case(candidate)
        result = self._first_result(calls)
        if not self._compiles and index == len(results):
            results.append(result.clone())
        elif not self._compiles and not _agree(result, results[index]):
            raise ValueError("its result is another")
        return self._time(calls)

    def _check_device(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)[:200]) from None


def _ratio(micros: float, base: float) -> float:
    return max(micros, 1e-3) / max(base, 1e-3)


def _agree(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    largest = expected.abs().max().float().item()
    return (result.float() - expected.float()).abs().max().item() <= TOLERANCE * largest + 1e-6


def _graph_micros(calls: Sequence[Call]) -> float:
    """µs a call, in a graph of all calls: the median of SAMPLES, each with enough replays to take about SAMPLE_US."""
    graph = _captured(calls)
    graph.replay()
    replays = max(1, min(100, int(SAMPLE_US / max(_sample(graph, 1), 1.0))))
    return statistics.median(_sample(graph, replays) for _ in range(SAMPLES)) / len(calls)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture without torch.cuda.graph(): it first collects garbage and frees memory, which takes longer than the rest."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        for call in calls:
            call()
    except BaseException:  # raised again: a capture that was begun must be ended
        with contextlib.suppress(RuntimeError):  # errors of a half-made graph do not matter
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def _sample(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays
