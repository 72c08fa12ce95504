"""The OpenAI surface: requests, their running, answers."""
