"""A filled slot enters; the batch that the caller holds leaves, on the host or on a GPU."""
