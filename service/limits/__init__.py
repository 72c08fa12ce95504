"""Bounds on what callers may ask of a front end at once, and how often."""
