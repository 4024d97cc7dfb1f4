"""Reports what a reader does: statistics, traces."""
