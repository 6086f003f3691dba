"""What repeats in a graph: blocks that are planned once, and the chain of units that a pipeline cuts."""
