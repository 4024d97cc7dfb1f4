"""Kinds of samples: the datasets that a field is read from, and the values that it delivers."""
