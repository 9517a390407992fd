"""What runs inside a rank. Nothing here imports the agent."""
