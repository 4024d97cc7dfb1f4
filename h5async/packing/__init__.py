"""Writes HDF5 files for training: packs other formats, and repacks HDF5 with better chunks."""
