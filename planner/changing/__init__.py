"""Training that changes while it runs: which layers are frozen when."""
