"""Every module that launches Triton kernels: the list by which a compile process finds a kernel.

A job names a kernel by its module and its name (triton_support/compile_process.py). A test compares this list with the modules
that launch kernels, so a new one needs a line here. Triton is imported when the list is first used.
"""

import functools
import sys
from typing import Any


@functools.cache
def compiled_kernels() -> dict[tuple[str, str], Any]:
    """Every kernel that a process may be asked to compile, by module and name."""
    from triton.runtime.jit import JITFunction

    from quire.kernels.attention import (  # noqa: F401
        decode,
        decode_schedule,
        latent_decode,
        latent_prefill,
        latent_rope_kv,
        prefill,
        prefill_hopper,
        prefill_schedule,
        rope_kv,
        varlen,
    )
    from quire.kernels.elementwise import activation, embedding, logits, norm  # noqa: F401
    from quire.kernels.exchange import all_reduce_norm, peer_link  # noqa: F401
    from quire.kernels.experts import (  # noqa: F401
        align,
        four_bits_pairs,
        four_bits_row,
        four_bits_tiles,
        four_bits_wide,
        grouped,
        pairs,
        pairs_row,
        routing,
        scaled_pairs,
        scaled_tiles,
        tiles,
        wide,
    )
    from quire.kernels.experts import scaled_row as scaled_expert_row  # noqa: F401
    from quire.kernels.linear import (  # noqa: F401
        fixed,
        int4,
        int4_hopper,
        int4_norm,
        int4_row,
        int4_wide,
        int8,
        linear,
        linear_hopper,
        norm_linear,
        quantize,
        scaled,
        scaled_fused,
        scaled_hopper,
        scaled_row,
        scaled_wide,
        split_linear,
        w8a16,
        w8a16_hopper,
        w8a16_row,
    )
    from quire.kernels.lora import products, rows, schedule  # noqa: F401
    from quire.kernels.persistent import scaled_block  # noqa: F401
    from quire.kernels.pooling import segments  # noqa: F401
    from quire.kernels.recurrent import (  # noqa: F401
        channel_prefill,
        convolution,
        convolution_windows,
        delta,
        delta_prefill,
        delta_windows,
        mamba,
        mamba_windows,
    )
    from quire.kernels.sampling import sampler, sampler_filter, sampler_sharded  # noqa: F401
    from quire.kernels.speculation import accept, draft_passes, features, ngram  # noqa: F401
    from quire.kernels.step import finish_windows, step_inputs, step_states, windows  # noqa: F401

    ours = [module for name, module in sys.modules.items() if name.startswith("quire.kernels.")]
    return {(m.__name__, name): value for m in ours for name, value in vars(m).items() if isinstance(value, JITFunction)}
