"""`AsyncReader`: options enter, batches leave; its engine, its position, its saved states."""
