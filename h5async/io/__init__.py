"""Reads byte ranges of local files into memory, and makes memory that processes share.

A path and byte ranges enter; bytes in the caller's memory leave. Stamps identify a state of a file.
"""
