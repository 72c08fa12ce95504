"""The main job, shown on the real service: `python -m torpor.service.walkthrough`."""
