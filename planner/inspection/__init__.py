"""Saved plans looked at without their models: the simulated step, where its time goes, what differs between two."""
