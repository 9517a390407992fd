"""Files by which a scheduler runs a `holdfast run` job. Text from values: nothing is started, and nothing is asked."""
