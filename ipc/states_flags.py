"""The flags of recurrent states, of models with recurrent layers."""

from collections.abc import Callable
from typing import Literal, get_args

from quire.ipc.memory_plan import LEAST_STATES
from quire.ipc.process.flags import human_int

StateDtype = Literal["auto", "float32", "bfloat16", "float16"]


def check_states(num_states: int | None) -> None:
    """Raises ValueError."""
    if num_states is not None and num_states < LEAST_STATES:
        raise ValueError(f"--num-states must be at least {LEAST_STATES}: one is never used, and a sequence may need two")


def add_state_arguments(add: Callable[..., None]) -> None:
    add(
        "--num-states",
        type=human_int,
        metavar="N",
        help="number of recurrent states: one for each running sequence, those that the prefix cache keeps, and one that is "
        "never used (default: what fits)",
    )
    add(
        "--mamba-ssm-cache-dtype",
        choices=list(get_args(StateDtype)),
        help="type of recurrent states: auto (the type that the checkpoint names, else float32)",
    )
