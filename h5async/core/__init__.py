"""Finds, loads and calls the compiled core, whose C sources are in src/.

Addresses of tables and memory enter; filled memory leaves.
"""
