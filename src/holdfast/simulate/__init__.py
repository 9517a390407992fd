"""The seeded simulation of `control/`: whole jobs in one thread, on virtual time, with everything that can go wrong."""
