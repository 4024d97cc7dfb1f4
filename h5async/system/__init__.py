"""Asks the system and the interpreter: limits, free memory, file systems, signals, time.

Nothing here knows of HDF5.
"""
