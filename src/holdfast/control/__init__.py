"""Decisions without effects: no clock, no socket, no process, no randomness. The shells around do what these say."""
