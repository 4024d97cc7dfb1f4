"""What the operating system and the interpreter say: limits, free memory, mounts, signals, time."""
