"""Work beside the verbs: failing objects are isolated, long work is cut into time slices, garbage is collected."""
