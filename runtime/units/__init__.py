"""Weights in use: what ranks own of them, gathered ahead of use, their gradients reduced behind it."""
