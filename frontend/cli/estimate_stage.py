"""One GPU's share of a model with tensor and pipeline parallelism, for `quire estimate`."""

from quire.frontend.cli.estimate_model import Model, computed_parameters, on_rank
from quire.frontend.cli.estimate_sizes import EstimateError
from quire.ipc.layout import split_layers


def share_of(model: Model, ranks: int, stages: int, *, expert_parallel: bool = False) -> Model:
    """The share of one of `ranks` GPUs in the largest of `stages` stages. Raises EstimateError."""
    own = model if ranks == 1 and not expert_parallel else on_rank(model, ranks, expert_parallel=expert_parallel)
    pairs = zip(own.sizes.layers, model.sizes.layers, strict=True)
    layers = tuple(layer._replace(cache_itemsize=whole.cache_itemsize) for layer, whole in pairs)
    own = own._replace(sizes=own.sizes._replace(layers=layers))
    if stages == 1:
        return own
    if stages > len(model.sizes.layers):
        raise EstimateError(f"--pipeline-parallel-size {stages} is more than the layers of {model.name} ({len(layers)})")
    table = model.sizes.vocab_size * model.sizes.hidden_size
    parts = split_layers(table, _layers(model, table, table), table, stages)
    head = table if model.is_tied else table // ranks
    sizes = _layers(own, table, head)
    held = [sum(sizes[i] for i in part) for part in parts]
    held[0], held[-1] = held[0] + table, held[-1] + head
    most = max(range(stages), key=held.__getitem__)
    layers_there = tuple(own.sizes.layers[i] for i in parts[most])
    return own._replace(
        sizes=own.sizes._replace(layers=layers_there),
        num_parameters=held[most],
        expert_parameters=own.expert_parameters * held[most] // own.num_parameters,
        stored_bytes=own.stored_bytes * held[most] // own.num_parameters,
        stored_expert_bytes=own.stored_expert_bytes * held[most] // own.num_parameters,
    )


def _layers(model: Model, embedding: int, head: int) -> list[int]:
    """Parameters of each layer: the computed ones, scaled to include others that a family has."""
    sizes = model.sizes
    computed = [computed_parameters(sizes._replace(vocab_size=0, layers=(layer,)), True) for layer in sizes.layers]
    scale = (model.num_parameters - embedding - (0 if model.is_tied else head)) / sum(computed)
    return [round(n * scale) for n in computed]
