"""The filler in a helper process: requests go out, filled slots in shared memory come back."""
