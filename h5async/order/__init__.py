"""Decides which samples a batch holds, from settings and a position. Opens no file."""
