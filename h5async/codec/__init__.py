"""Undoes single HDF5 filters, one format a file; `filters.py` is the registry of them.

Encoded bytes, as they lie in the file, enter; what the filter was given leaves.
"""
