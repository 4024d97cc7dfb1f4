"""Asks the system and the interpreter: limits, free memory, file systems, signals, time."""
