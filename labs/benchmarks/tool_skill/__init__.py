"""The embedded model's tool skill: tools, asks that they answer, the calls, and what is said of their results."""
