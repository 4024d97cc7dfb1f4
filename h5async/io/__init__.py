"""Reads byte ranges of local files into memory, and makes memory that processes share."""
