"""SchedulerConfig: the scheduler's settings, fixed once the workers have reported what they can hold (daemon.py)."""

from dataclasses import dataclass

from quire.enginecore.kv.manager import KVManager
from quire.enginecore.kv.states import NoStates, States
from quire.enginecore.scheduling.prefill_budget import MIXED_STEP_TOKENS
from quire.ipc.media import ITEM_BYTES
from quire.ipc.messages.workers import KVGroupKind
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.step.sections import STATE_CHUNK


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_groups: tuple[KVGroupKind, ...]
    num_states: int = 0  # recurrent states, with the dummy; 0: the model has none
    state_chunk: int = STATE_CHUNK
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    look_ahead: bool = True  # False: admit while blocks are free, and preempt when they run out
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    mixed_step_tokens: int = MIXED_STEP_TOKENS  # target size of the steps with decode rows over which prompts are spread
    num_micro_batches: int = 1  # of decode rows, scheduled in turn: as many as the model has stages
    has_whole_prompts: bool = False  # a prompt is computed in one step
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: no such limit
    speculation: SpeculativeConfig | None = None
    num_adapter_slots: int = 0  # on the device; 0: no adapters are served
    encoder_rows: int = 0  # tokens of items that the encoder cache has room for; 0: the model takes text alone
    max_whole_span: int = 0  # most tokens of items that see each other, which one step computes together
    item_bytes: int = ITEM_BYTES  # most bytes of items on their way to the workers
    max_queue_s: float = 0.0  # a waiting sequence comes before all priorities after this; 0: never

    def kv_manager(self) -> KVManager:
        """The blocks of all sequences, with the padding slot's table, and the pool of recurrent states that the model needs."""
        shape = self.num_blocks, self.block_size, self.kv_groups, self.max_num_seqs + 1
        states = States(self.num_states, self.block_size, self.state_chunk) if self.num_states else NoStates()
        return KVManager(*shape, states, self.max_whole_span)
