"""Fills slots in helper processes: requests go there, filled slots in shared memory come back."""
