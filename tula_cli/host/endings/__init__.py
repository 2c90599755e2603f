"""What each class of ending means, and what follows from it."""
