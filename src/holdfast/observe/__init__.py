"""What is written down and what is told: events first, text made from them."""
