"""Describes how HDF5 filters are undone, and decodes images."""
