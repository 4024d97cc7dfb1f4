"""Fills slots in a helper process: requests go there, filled slots in shared memory come back."""
