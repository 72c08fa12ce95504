"""Where the actors meet Ray: ports over actor handles, and the making of ranks."""
