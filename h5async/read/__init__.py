"""Executes plans: part of a plan enters; rows of a batch leave, by the core, Python or h5py."""
