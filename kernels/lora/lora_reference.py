"""LoRA in torch: the CPU worker's path, and the oracle of schedule.py and products.py."""

import numpy as np
import torch
import torch.nn.functional as F

from quire.ipc.step.sections import SLOT
from quire.kernels.lora.tables import LoraWeights
from quire.kernels.step.tables import SlotTables, StepBuffers

Groups = list[tuple[int, torch.Tensor]]  # of each adapter slot in use: its tokens, int64

_ADAPTER, _FROM = SLOT.at["adapter"], SLOT.at["adapter_from"]


def adapter_ids(tables: SlotTables, step: StepBuffers, num_tokens: int) -> np.ndarray:
    """The adapter slot of each of a step's tokens, int32 [T]; -1: none."""
    rows = int(step.num_rows[0])
    lengths = np.diff(step.query_start[: rows + 1].cpu().numpy())
    slots = step.row_slots[:rows].cpu().numpy().repeat(lengths)
    ids = _of_slots(tables, slots, step.positions[: len(slots)].cpu().numpy())
    return np.concatenate([ids, np.full(num_tokens - len(ids), -1, np.int32)])


def sample_ids(tables: SlotTables, step: StepBuffers, num_samples: int, has_windows: bool) -> np.ndarray:
    """The same of its samples."""
    slots, positions = (step.sample_slots, step.sample_positions) if has_windows else (step.row_slots, step.seq_lens)
    return _of_slots(tables, slots[:num_samples].cpu().numpy(), positions[:num_samples].cpu().numpy() - 1)


def _of_slots(tables: SlotTables, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    params = tables.params.cpu().numpy()[slots]
    return np.where(positions >= params[:, _FROM], params[:, _ADAPTER], np.int32(-1))


def groups_of(ids: np.ndarray) -> Groups:
    return [(slot, torch.from_numpy(np.flatnonzero(ids == slot))) for slot in np.unique(ids[ids >= 0]).tolist()]


def add_lora(x: torch.Tensor, y: torch.Tensor, weights: LoraWeights, groups: Groups) -> torch.Tensor:
    """y [T, out] with the tokens' adapters added in place; x [T, in], or ids [T] of a table. Sums are in float32."""
    for slot, tokens in groups:
        tokens = tokens.to(x.device)
        rows = x.index_select(0, tokens)
        for piece, (rank, scale) in enumerate(zip(weights.ranks[slot].tolist(), weights.scales[slot].tolist(), strict=True)):
            if not rank:
                continue
            a = weights.a_of(slot, piece, rank)
            hidden = a.T.index_select(0, rows) if weights.is_table else F.linear(rows.float(), a.float()).to(a.dtype)
            delta = F.linear(hidden.float(), weights.b_of(slot, piece, rank)[:, :rank].float()) * scale
            first, end = weights.pieces[piece]
            part = y[:, first:end]
            part.index_copy_(0, tokens, (part.index_select(0, tokens).float() + delta).to(y.dtype))
    return y


def pair_product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """y [P, N], y[p] = w[ids[p]] x[p] + bias[ids[p]]; x [P, K], w [E, N, K]. Zero where the id is E: another rank's expert."""
    y = x.new_zeros(len(x), w.shape[1])
    for expert in ids.unique().tolist():
        if expert < len(w):
            pairs = (ids == expert).nonzero()[:, 0]
            y[pairs] = F.linear(x[pairs], w[expert], None if bias is None else bias[expert])
    return y


def pair_ids(adapters: np.ndarray, ids: np.ndarray, num_experts: int) -> np.ndarray:
    """adapter slot * E + expert of each pair, -1: none; adapters [T] of each token, ids [T, k] of this rank's E experts."""
    is_there = (adapters[:, None] >= 0) & (ids < num_experts)
    return np.where(is_there, adapters[:, None] * num_experts + ids, -1).flatten()


def add_up(y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, ids: torch.Tensor, held: int) -> torch.Tensor:
    """[T, H], the sum of y [T k, H] with weights [T, k], in float32 and in order, `shared` [T, H] first.

    held: with expert parallelism, the number of this rank's experts; pairs of others contribute zero."""
    if held:
        weights = weights.where(ids < held, 0.0)
    parts = y.float().unflatten(0, weights.shape) * weights[:, :, None]
    out = parts[:, 0] if shared is None else parts[:, 0] + shared
    for j in range(1, weights.shape[1]):
        out = out + parts[:, j]
    return out.to(y.dtype)
