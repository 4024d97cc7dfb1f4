"""Kinds of samples: what a field is read of, and what is delivered of it."""
