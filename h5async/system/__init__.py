"""Interfaces to the operating system and the interpreter: limits, memory, signals, threads, jobs.

Nothing here depends on HDF5.
"""
