"""The metadata of an HDF5 file enters; where the rows of a dataset lie, and how, leaves."""
