"""What crosses a process boundary: messages and the channels that carry them."""
