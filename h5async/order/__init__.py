"""Settings and a position enter; which samples a batch holds leaves. Pure."""
