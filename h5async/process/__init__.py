"""Fills slots in helper processes: requests go out, filled slots in shared memory come back."""
