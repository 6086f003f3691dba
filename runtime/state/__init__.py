"""What a rank holds of a model: which rectangles of which tensors, in a tree of modules, from which first weights."""
