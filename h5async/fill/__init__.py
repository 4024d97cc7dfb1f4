"""Fills slots with batches: a request for a batch enters; a filled slot leaves."""
