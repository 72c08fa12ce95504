"""Who may do what over HTTP: tokens, roles, and the table of routes."""
