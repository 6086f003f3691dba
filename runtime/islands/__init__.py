"""Islands of ranks with slow links between them: who is on which, and training that meets every H steps (DiLoCo)."""
