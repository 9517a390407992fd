"""What a person sees of a job in a terminal: `holdfast status`, `top`, `logs` and `ls`."""
