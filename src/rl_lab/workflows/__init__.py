"""The algorithms: one file each."""
