"""What the backward pass needs: kept values, what can be computed again, and the peak of memory in between."""

from passes.autograd.peak import working_peak
from passes.autograd.recompute import POLICIES, Activations, Recompute, kept_under
from passes.autograd.saved import Extra, Kept, kept_by_autograd
from passes.autograd.storage import activations, held_constants, storage_roots

__all__ = [
    "POLICIES",
    "Activations",
    "Extra",
    "Kept",
    "Recompute",
    "activations",
    "held_constants",
    "kept_by_autograd",
    "kept_under",
    "storage_roots",
    "working_peak",
]
