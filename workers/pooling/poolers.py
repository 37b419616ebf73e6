"""Poolers: hidden states of packed rows -> a float32 vector of each row, or of each of its tokens, or a score by label.

A pooler is called with the hidden states [T, H] of a step's rows and their `Spans`; what it computes depends on the row alone.
`SentencePooler` runs the stages of sentence-transformers' files (sentence_transformers.py), `TokenPooler` those of tokens
alone, `SparsePooler` SPLADE's, `LabelPooler` a head's scores. `cut` shortens vectors of Matryoshka models.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from quire.kernels.elementwise import activation_cpu
from quire.kernels.pooling import segments_cpu
from quire.kernels.pooling.segments_cpu import How
from quire.workers.layers.heads import Head
from quire.workers.loading.files import open_file
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.pooling.labels import LabelActivation, activate_labels
from quire.workers.pooling.sentence_transformers import (
    DenseStage,
    Mode,
    NormalizeStage,
    PoolingConfigError,
    PoolingStage,
    SentenceTransformers,
    SpladeStage,
    Unit,
)

LOGITS_AT_ONCE = 512  # tokens whose logits over the vocabulary are in memory at a time
DEFAULT = SentenceTransformers(stages=(PoolingStage(("cls",)), NormalizeStage()))  # of an encoder without such files


class Spans(NamedTuple):
    """The rows of packed hidden states: int32 [R] each, on their device."""

    firsts: torch.Tensor
    ends: torch.Tensor
    prompts: torch.Tensor | None = None  # the rows' numbers of prompt tokens; None: not known, so none are left out

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, prompts: torch.Tensor | None = None) -> "Spans":
        return cls(cu_seqlens[:-1], cu_seqlens[1:], prompts)

    def behind_prompts(self) -> "Spans":
        """The rows without their prompts."""
        return self if self.prompts is None else self._replace(firsts=torch.minimum(self.firsts + self.prompts, self.ends))

    def lists(self) -> list[tuple[int, int]]:
        """(first, end) of each row, on the host. It waits for the device."""
        return list(zip(self.firsts.tolist(), self.ends.tolist(), strict=True))


def _segments(x: torch.Tensor, spans: Spans, origins: torch.Tensor, how: How) -> torch.Tensor:
    if x.is_cuda:
        from quire.kernels.pooling.segments import segments  # imports Triton, which a CPU may not have

        return segments(x, spans.firsts.contiguous(), spans.ends.contiguous(), origins.contiguous(), how)
    return segments_cpu.segments(x, spans.firsts, spans.ends, origins, how)


def pooled(hidden: torch.Tensor, spans: Spans, mode: Mode, include_prompt: bool = True) -> torch.Tensor:
    """float32 [R, H] of hidden states [T, H].

    Without the prompt a mean is of the tokens behind it, whose weights still count from the row's first; `cls` is the first of
    them, unless there are none; a row that is all prompt has a mean of 0.
    """
    origins = spans.firsts
    rows = spans if include_prompt else spans.behind_prompts()
    if mode == "cls":
        firsts = torch.where(rows.firsts < rows.ends, rows.firsts, origins)
        return hidden.index_select(0, firsts).float()
    if mode == "lasttoken":
        return hidden.index_select(0, rows.ends - 1).float()
    if mode == "max":
        return _segments(hidden, rows, origins, "max")
    total = _segments(hidden, rows, origins, "weighted" if mode == "weightedmean" else "sum")
    first, end = (rows.firsts - origins).float(), (rows.ends - origins).float()
    counts = end - first
    if mode == "weightedmean":
        counts = (end * (end + 1) - first * (first + 1)) / 2
    if mode == "mean_sqrt_len_tokens":
        counts = counts.sqrt()
    return total / counts.clamp(min=1e-9)[:, None]


def normalized(x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1)


def cut(vectors: torch.Tensor, size: int, normalizes: bool) -> torch.Tensor:
    """The first `size` elements of vectors [N, D], of length 1 again if they were so."""
    shorter = vectors[..., :size]
    return normalized(shorter) if normalizes else shorter


class Dense:
    """A dense layer of sentence-transformers' files, in float32: [N, in] -> [N, out]. Every rank has it."""

    def __init__(self, stage: DenseStage, folder: Path, device: torch.device):
        self._stage = stage
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (stage.out_features, stage.in_features)}
        if stage.has_bias:
            expected["linear.bias"] = (stage.out_features,)
        if stage.has_residual and stage.in_features != stage.out_features:
            expected["residual.weight"] = (stage.out_features, stage.in_features)
        found = read_weights(folder / stage.folder, expected, device)
        self._weight, self._bias, self._residual = (
            found["linear.weight"],
            found.get("linear.bias"),
            found.get("residual.weight"),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self._weight, self._bias)
        if self._stage.activation != "identity":
            y = activation_cpu.activate(y, activation=self._stage.activation)  # type: ignore[arg-type]
        if not self._stage.has_residual:
            return y
        return y + (x if self._residual is None else functional.linear(x, self._residual))


def read_weights(folder: Path, expected: dict[str, tuple[int, ...]], device: torch.device) -> dict[str, torch.Tensor]:
    """float32 tensors of a module's own folder: exactly these. Raises WeightsError."""
    names = ("model.safetensors", "pytorch_model.bin")
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise WeightsError(f"{folder} has neither {' nor '.join(names)}")
    with open_file(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        if shapes != expected:
            raise WeightsError(f"{path} holds {shapes}, expected are {expected}")
        return {name: file.get_tensor(name).to(device, torch.float32, copy=True) for name in expected}


class SentencePooler:
    """A vector of each row, by the stages of sentence-transformers' files, in their order.

    Stages of tokens come before the pooling, stages of texts behind it. Raises PoolingConfigError for other orders and sizes.
    """

    def __init__(self, spec: SentenceTransformers, folder: Path, hidden_size: int, device: torch.device):
        poolings = [stage for stage in spec.stages if isinstance(stage, PoolingStage)]
        if len(poolings) != 1 or any(isinstance(stage, SpladeStage) for stage in spec.stages):
            raise PoolingConfigError("modules.json must have one Pooling module for vectors of texts")
        self.normalizes, self._pooling = spec.normalizes, poolings[0]
        at = spec.stages.index(self._pooling)
        self._tokens = TokenStages(spec.stages[:at], folder, hidden_size, device, "token")
        size = self._tokens.size * len(self._pooling.modes)
        self._texts = TokenStages(spec.stages[at + 1 :], folder, size, device, "text")
        self.size = self._texts.size

    def __call__(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """float32 [R, size]."""
        x = self._tokens(hidden)
        parts = [pooled(x, spans, mode, self._pooling.include_prompt) for mode in self._pooling.modes]
        return self._texts(parts[0] if len(parts) == 1 else torch.cat(parts, -1))


class TokenStages:
    """Dense layers and norms of vectors [N, H], each alone: of tokens, or behind a pooling of texts."""

    def __init__(self, stages: tuple[object, ...], folder: Path, size: int, device: torch.device, unit: Unit):
        self._run = []
        for stage in stages:
            if not isinstance(stage, DenseStage | NormalizeStage) or stage.unit != unit:
                raise PoolingConfigError(f"modules.json: a module {type(stage).__name__} does not work where it stands")
            if isinstance(stage, NormalizeStage):
                self._run.append(normalized)
                continue
            if stage.in_features != size:
                raise PoolingConfigError(f"{stage.folder}/config.json: in_features is {stage.in_features}, but gets {size}")
            self._run.append(Dense(stage, folder, device))  # type: ignore[arg-type]
            size = stage.out_features
        self.size = size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._run:
            x = x.float()
        for run in self._run:
            x = run(x)
        return x


class TokenPooler:
    """A vector of each token: float32 [T, size], of which a row's are those of its span."""

    def __init__(self, spec: SentenceTransformers, folder: Path, hidden_size: int, device: torch.device):
        self._stages = TokenStages(spec.stages, folder, hidden_size, device, "token")
        self.size = self._stages.size

    def __call__(self, hidden: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
        vectors = self._stages(hidden).float()
        return [vectors[first:end] for first, end in spans.lists()]


class Logits(Protocol):
    """encoder.Encoder.compute_all_logits."""

    def __call__(self, hidden_rows: torch.Tensor) -> torch.Tensor: ...


class SparsePooler:
    """SPLADE (arXiv:2109.10086): a weight of each token of the vocabulary, float32 [R, V], most of them 0."""

    def __init__(self, stage: SpladeStage, logits: Logits, vocab_size: int):
        self._stage, self._logits, self.size = stage, logits, vocab_size

    def __call__(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """The logits of some tokens at a time are in memory: a row's maximum, or sum, is taken piece by piece."""
        out = torch.zeros(len(spans.firsts), self.size, dtype=torch.float32, device=hidden.device)
        for row, (first, end) in enumerate(spans.lists()):
            for begin in range(first, end, LOGITS_AT_ONCE):
                weights = self._logits(hidden[begin : min(begin + LOGITS_AT_ONCE, end)]).float().relu_()
                for _ in range(self._stage.times):
                    weights.log1p_()
                if self._stage.strategy == "max":
                    torch.maximum(out[row], weights.amax(0), out=out[row])
                else:
                    out[row] += weights.sum(0)
        return out


class LabelPooler:
    """A head's scores: float32 [R, labels] of texts, or [T, labels] of tokens as a list by row."""

    def __init__(self, head: Head, activation: LabelActivation):
        self._head, self._activation, self.size = head, activation, head.spec.num_outputs

    def logits(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        """float32 [R, labels], before the activation."""
        pooling = self._head.spec.pooling
        if pooling == "late":
            return pooled(self._head(hidden), spans, "mean")
        return self._head(pooled(hidden, spans, pooling).to(hidden.dtype)).float()

    def __call__(self, hidden: torch.Tensor, spans: Spans) -> torch.Tensor:
        return activate_labels(self.logits(hidden, spans), self._activation)

    def of_tokens(self, hidden: torch.Tensor, spans: Spans) -> list[torch.Tensor]:
        """[n, labels] of the n tokens of each row."""
        scores = activate_labels(self._head(hidden).float(), self._activation)
        return [scores[first:end] for first, end in spans.lists()]
