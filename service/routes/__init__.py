"""HTTP routes, one file per surface."""
