"""Tests with the real frameworks. A package, so that its modules may have their names."""
