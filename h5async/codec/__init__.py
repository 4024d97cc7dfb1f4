"""Undoes single HDF5 filters, one format per file; `filters.py` is their registry.

Encoded bytes, as stored in the file, enter; the filter's input leaves.
"""
