"""A slice of a plan enters; rows of a batch leave, by the core, by Python, or by h5py."""
