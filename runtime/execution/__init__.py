"""Running a plan of a whole step: its chunks, micro-batches, units and pipeline, on this rank or on all at once."""
