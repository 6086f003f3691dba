"""What the backward pass needs: saved values, what can be recomputed, and the peak of memory in between."""

from passes.autograd.peak import working_peak
from passes.autograd.recompute_policies import POLICIES, Activations, Recompute, kept_under
from passes.autograd.saved import Extra, SavedForBackward, kept_by_autograd
from passes.autograd.shared_memory import activations, held_constants, storage_roots

__all__ = [
    "POLICIES",
    "Activations",
    "Extra",
    "Recompute",
    "SavedForBackward",
    "activations",
    "held_constants",
    "kept_by_autograd",
    "kept_under",
    "storage_roots",
    "working_peak",
]
