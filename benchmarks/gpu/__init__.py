"""One command that proves the whole product on a machine with GPUs: ``python -m benchmarks.gpu``."""
