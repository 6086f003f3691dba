"""The ranks of a mesh: whole tensors to parts and back, groups over several axes, tensors of the first rank."""
