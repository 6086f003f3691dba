"""Make torch know the fused operators, when it is asked about one."""

from __future__ import annotations

from passes.ir.torch_facts import before_asking


def register_before_asking() -> None:
    """Import the operators' package, and with it torch, as soon as torch is asked what is not known already."""
    before_asking(_register)


def _register() -> None:
    import runtime.kernels  # noqa: F401
