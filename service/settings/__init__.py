"""Configuration: its shape, and how it is read."""
