"""Holdfast in other people's training loops. Each module needs its framework, and is imported by name."""
