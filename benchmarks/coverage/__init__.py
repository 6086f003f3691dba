"""Coverage: every model type that transformers can build tiny and train, captured, planned and verified."""
