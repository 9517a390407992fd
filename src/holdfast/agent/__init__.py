"""A node's supervisor: the process a user starts, and the helpers it keeps beside it. Nothing here imports torch."""
