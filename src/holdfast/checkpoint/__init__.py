"""Training state that outlives what made it: snapshots in memory, checkpoints on storage."""
