"""Live migration: the state of training moves from the ranks of one plan to those of another, without a file."""
