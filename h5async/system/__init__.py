"""Asks the system and the interpreter: limits, free memory, file systems, signals, time.

Paths, exceptions and timeouts enter; plain numbers and answers leave. Nothing here knows of HDF5.
"""
