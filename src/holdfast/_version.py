"""The version, alone, so that the build reads it without importing anything."""

__version__ = "0.4.0"
