"""Finds, loads and calls the compiled core, whose C sources lie in src/."""
