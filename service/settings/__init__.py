"""Configuration: its shape, its keys of later versions, and how it is read."""
