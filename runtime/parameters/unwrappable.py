"""A module that no other parallelism may wrap, nor anybody pickle: each is refused before it changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unwrappable:
    """Goes before ``nn.Module`` among the bases of a module that is parallel already.

    What wraps a module asks or tells it something first; that is where each is met.
    """

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """DistributedDataParallel asks for this before it touches a parameter."""
        raise _wrapped_error("DistributedDataParallel (nor accelerate.prepare, which uses it)")

    def _replicate_for_data_parallel(self) -> Any:
        raise _wrapped_error("DataParallel")

    def __setattr__(self, name: str, value: Any) -> None:
        # FullyShardedDataParallel marks a module before it touches a parameter.
        if name == "_is_fsdp_managed_module":
            raise _wrapped_error("FSDP")
        super().__setattr__(name, value)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        # fully_shard puts its hook in place before it touches a parameter.
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            raise _wrapped_error("fully_shard (zero=3 in planner.compile's fix shards weights over the data ranks)")
        return super().register_forward_pre_hook(hook, **options)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a parallel module cannot be pickled: it is one rank's part, tied to its process group. Save weights by "
            "save_pretrained or planner.CheckpointManager, the plan by save; copy.deepcopy copies it"
        )


def _wrapped_error(wrapper: str) -> ValueError:
    return ValueError(f"a parallel module is data-parallel and sharded already: use it as it is, without {wrapper}")
