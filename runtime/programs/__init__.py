"""Emitted programs: their base class, and those that are kept by the kind of call that they are for."""
