"""The coordinator: a pure state machine, a journal, and Ray at the edge."""
