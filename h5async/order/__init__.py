"""Computes the samples of a batch from settings and a position. Opens no file."""
