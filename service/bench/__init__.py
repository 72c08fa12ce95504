"""`torpor bench`: what sleep and wake cost on the device at hand, beside what the machine itself takes for the bytes."""
