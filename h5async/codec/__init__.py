"""Says how HDF5 filters are undone; decodes images."""
