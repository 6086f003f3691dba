"""Linear programs as arrays, and the solvers that solve them."""
