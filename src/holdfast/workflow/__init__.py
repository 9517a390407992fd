"""Tasks that run somewhere else when their node is bad: from one YAML file to a cluster that heals."""
