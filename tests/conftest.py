"""Settings of all tests."""

from hypothesis import settings

# A busy machine makes any single example slow; what is tested is what the code does, never how long it takes.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
