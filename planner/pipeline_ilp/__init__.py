"""Where a pipeline is cut and what each unit runs as: the stage problem, its bounds and its integer program."""
