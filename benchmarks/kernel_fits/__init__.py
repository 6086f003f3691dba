"""Kernel models of the presets fitted to tables of measured kernels; ``python -m benchmarks.kernel_fits``."""
