"""Computes statistics of a dataset's values, reading all of it once."""
