"""Finds, loads and calls the compiled core, whose C sources lie in src/.

Slices of read plans and addresses of memory enter; filled memory leaves, and how many items were
done.
"""
