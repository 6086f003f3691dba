"""Planning a whole training step: what each unit of a model runs as, and where the pipeline is cut."""
