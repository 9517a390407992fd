"""The same bits at any number of ranks: leaves of a batch, summed in one fixed tree."""
