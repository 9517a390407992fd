"""Who coordinates a job of several nodes, and where the coordinator's record is kept."""
