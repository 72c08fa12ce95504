"""The default engine: transformers models over paged K and V."""
