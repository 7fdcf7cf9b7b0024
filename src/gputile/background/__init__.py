"""Support for background work: isolating failing objects, time slices for long work, and garbage collection."""
