"""What becomes of a request that meets a closed gate: refused, queued, or let in once the model was woken for it."""
