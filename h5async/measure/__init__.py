"""Measures the values of a dataset: reads all of it once, and reduces it to a few numbers."""
