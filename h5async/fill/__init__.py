"""A request for a batch enters; a filled slot leaves."""
