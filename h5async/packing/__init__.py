"""Writes HDF5 files for training: into HDF5, and into the right HDF5."""
