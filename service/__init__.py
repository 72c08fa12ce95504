"""The front door: HTTP, command line, Python client."""
