"""Makes HDF5 files: of other formats, and of HDF5 files that are stored unsuitably."""
