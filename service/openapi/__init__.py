"""The OpenAPI document of the whole surface: routes as FastAPI knows them, answers as a table says."""
