"""A rank: one shard of a model on one GPU, its ledger, engine and gate."""
