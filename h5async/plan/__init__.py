"""Plans how a batch is read: sample numbers and layouts enter; a few arrays leave. No I/O."""
