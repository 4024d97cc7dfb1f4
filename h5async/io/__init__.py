"""Byte ranges of files enter; memory leaves, read or mapped, also memory that processes share."""
