"""What ends a measurement before its figures."""


class BenchError(Exception):
    """Nothing can be measured; the text says what to change."""
