"""Surfaces that clients of other engines know already: which one a request speaks, and what it asks for in ours."""
