"""The sharding search: pick one strategy per operator so that a training step takes least time (see ``ilp``)."""

from planner.search.price import price
from planner.search.search import search

__all__ = ["price", "search"]
