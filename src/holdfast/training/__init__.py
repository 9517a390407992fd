"""What a training script says: what to keep, which data, and when a step is done."""
