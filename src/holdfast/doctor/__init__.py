"""Whether this machine, and the way to others, is fit for a job: small checks, each in a process of its own."""
