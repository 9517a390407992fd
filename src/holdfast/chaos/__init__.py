"""Breaking a job on purpose: faults as data, campaigns of them, and a verdict on how the job came through."""
