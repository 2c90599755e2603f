"""Long rows of numbers that a training keeps, in a form of their own."""
