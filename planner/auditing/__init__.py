"""Auditing: what a saved plan claims, priced, counted and bounded again from the plan, the model and the cluster."""
