"""Reads selections of datasets like NumPy, in threads and without HDF5's lock."""
