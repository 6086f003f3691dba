"""Outputs of frozen layers, kept per sample: a hit is read in the place of computing them."""
