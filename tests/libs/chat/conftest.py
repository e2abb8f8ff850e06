"""Two busy cores must not fail a property."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
