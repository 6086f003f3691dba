"""The sharding search: pick one strategy per operator so that a training step takes least time (see ``ilp``)."""

from planner.search.search import search

__all__ = ["search"]
