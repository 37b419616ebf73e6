"""vLLM's classes for what Quire does not serve: scripts may import them, and hear the reason when they make one."""

from typing import Any


class _NotServed:
    """Raises NotImplementedError, with `reason`, when it is made."""

    reason = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: {self.reason}")


class LoRARequest(_NotServed):
    reason = "LoRA adapters are not served yet: merge the adapter into the model's weights"
