"""Ray actors: the rank per GPU, the coordinator, and the default engine."""
