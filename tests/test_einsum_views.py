"""What an einsum keeps of operands without gaps is as foreseen: their memory, or a copy."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.whole_step.result.einsum_views import operands_taken_as_they_are

LETTERS = "bcefhs"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_operands_are_kept_as_foreseen(data: st.DataObject) -> None:
    some = st.sets(st.sampled_from(LETTERS), min_size=1)
    left, right = (data.draw(st.permutations(sorted(data.draw(some)))) for _ in range(2))
    summed = data.draw(st.sets(st.sampled_from(LETTERS))) & set(left) & set(right)
    result = data.draw(st.permutations(sorted((set(left) | set(right)) - summed)))
    assume(summed)
    sizes = {letter: data.draw(st.integers(1, 4)) for letter in LETTERS}
    operands = [torch.rand([sizes[letter] for letter in own], requires_grad=True) for own in (left, right)]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(result)}"
    saved_storages: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        torch.einsum(equation, *operands)
    as_they_are = tuple(one.untyped_storage().data_ptr() in saved_storages for one in operands)
    assert operands_taken_as_they_are(equation, [one.shape for one in operands]) == as_they_are, equation


def test_of_other_equations_nothing_is_said() -> None:
    assert operands_taken_as_they_are("...ij,jk->...ik", [(2, 3), (3, 4)]) == (False, False)
    assert operands_taken_as_they_are("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]) == (False, False, False)
    assert operands_taken_as_they_are("ij,jk", [(2, 3), (3, 4)]) == (False, False)
