"""Private names of transformers and accelerate that their subclasses need; nowhere else in this layer."""
