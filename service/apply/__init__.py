"""Reconciling a running cluster to a file: what is to be done, and the doing of it."""
