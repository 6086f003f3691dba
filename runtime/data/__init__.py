"""Data for training: every data-parallel group reads its own samples, in an order that no plan changes."""
