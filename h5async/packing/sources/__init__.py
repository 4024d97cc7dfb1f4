"""Sources of samples to pack, a module each."""
