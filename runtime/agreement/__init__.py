"""Ranks that do the same: one error for all, one call for all, one captured graph."""
