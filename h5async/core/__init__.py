"""The compiled core, in C, and how it is found, loaded and called."""
