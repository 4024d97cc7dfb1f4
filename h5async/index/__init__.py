"""Reads the metadata of HDF5 files: where the rows of a dataset lie, and how they are encoded.

A row is one sample of one field as stored in the file. A dataset is read directly if its bytes are
read from the file without HDF5, and through h5py if its layout has a `fallback_reason`.
"""
