"""`torpor doctor`: what of this machine is in Torpor's way, and how it is mended."""
