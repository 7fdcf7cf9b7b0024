"""Support for background work: isolating failing objects, and garbage collection."""
