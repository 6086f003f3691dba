"""planner.verify: every rank of a plan in one process, held against the model on one device."""
