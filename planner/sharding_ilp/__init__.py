"""The sharding search: one strategy for every operator, so that a step takes least time (see ``sharding_program``)."""

from planner.sharding_ilp.search_mesh import search

__all__ = ["search"]
